"""Faults planted in the attention kernels: every fault must change the output or be reported by the emulation."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cuda import attention
from pagewire.kernels.cuda.compile import OLDEST
from pagewire.kernels.cuda.launch import HOPPER
from pagewire.kernels.cuda.source import read_source
from pagewire.kernels.data.paging import CAUSAL, WHOLE, LogitTerms
from tests.kernels.batches import TOLERANCE, Paged, Shape, page, random_request
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher
from tests.kernels.cuda.emulate.library import load_all
from tests.kernels.cuda.test_attention import BF16, E4M3, FP16, batch_of, everything, expect, run
from tests.kernels.cuda.test_two_sided import biases

HEADS = 6
SHAPE = Shape(num_heads=HEADS, num_kv_heads=2, head_dim=64, v_head_dim=64, block_size=16)


DECODED = batch_of([(0, 1), (40, 41), (0, 0), (1100, 1101)], SHAPE, padding=2)
MIXED = batch_of([(0, 65), (0, 0), (20, 21), (130, 200)], SHAPE, padding=2)
WHOLE_PROMPTS = batch_of([(0, 65), (0, 1), (0, 130), (0, 17)], SHAPE, padding=2)
# The last request's tokens in chunks of different lengths.
CHUNKS = ((1088, 1089), (1087, 1089), (1019, 1054), (1019, 1089))
SAME = [random_request(SHAPE, 1089, FP16, seed) for seed in (1, 2)]
SAME = [dataclasses.replace(request, q=4 * request.q) for request in SAME]  # large logits are rounded by more
CUTS = {chunk: page(SHAPE, SAME, [(5, 6), chunk]) for chunk in CHUNKS}
Case = tuple[Paged, LogitTerms, torch.dtype]
decode: list[Case] = [
    (DECODED, CAUSAL, BF16),
    (DECODED, everything(HEADS), BF16),
    (DECODED, LogitTerms(window=5, alibi=torch.linspace(0.1, 2, HEADS)), BF16),
    (DECODED, LogitTerms(chunk=480), BF16),
]
decode_fp8: list[Case] = [(DECODED, CAUSAL, E4M3)]
prefill: list[Case] = [
    (MIXED, CAUSAL, BF16),
    (MIXED, LogitTerms(window=50, sinks=torch.full((HEADS,), 3.0)), BF16),
    (MIXED, LogitTerms(chunk=150), BF16),
]
warpgroups: list[Case] = [
    *prefill,
    (
        batch_of([(0, 150), (300, 400)], dataclasses.replace(SHAPE, head_dim=128, v_head_dim=128)),
        CAUSAL,
        BF16,
    ),
]
prefill_fp8: list[Case] = [(MIXED, CAUSAL, E4M3)]
two_sided: list[Case] = [
    (WHOLE_PROMPTS, LogitTerms(future=WHOLE), BF16),
    (WHOLE_PROMPTS, LogitTerms(future=4, window=5), BF16),
    (WHOLE_PROMPTS, LogitTerms(future=WHOLE, relative_bias=biases(HEADS)), BF16),
]


@functools.cache
def expected(number: int, which: str) -> Tensor:
    return expect(*globals()[which][number])


def check_spans(launcher: EmulatedLauncher) -> None:
    """Results are right. No bit of a token depends on its chunk, or on whether spans have blocks of their own."""
    sinks = torch.full((HEADS,), 3.0)
    for terms in (
        CAUSAL,
        LogitTerms(window=5),
        LogitTerms(window=700, sinks=sinks),
        LogitTerms(chunk=350),
    ):
        found: dict[int, Tensor] = {}
        for multiprocessors, (chunk, paged) in (
            (1, (CHUNKS[0], CUTS[CHUNKS[0]])),
            *((60, cut) for cut in CUTS.items()),
        ):
            launcher = dataclasses.replace(launcher, multiprocessors=multiprocessors)
            out = run(launcher, paged, terms, FP16, invariant=True)
            torch.testing.assert_close(out.double(), expect(paged, terms, FP16), atol=TOLERANCE[FP16], rtol=0)
            for token, row in zip(range(*chunk), out[1:].view(torch.int16), strict=True):
                assert torch.equal(found.setdefault(token, row), row)


def check_all(which: str, launcher: EmulatedLauncher) -> None:
    if which == "spans":
        return check_spans(launcher)
    capability = HOPPER if which == "warpgroups" else OLDEST
    launcher = dataclasses.replace(launcher, multiprocessors=20, capability=capability)  # for several splits
    for number, case in enumerate(globals()[which]):
        out = run(launcher, *case)
        torch.testing.assert_close(out.double(), expected(number, which), atol=TOLERANCE[BF16], rtol=0)


SHARED, DECODE, PREFILL = "attention.cuh", "decode_attention.cu", "prefill_attention.cu"
TILES, PRODUCTS, WARPGROUPS = "prefill.cuh", "warpgroup.cuh", "warpgroup_attention.cu"
SPANS = "span_attention.cu"
FAULTS = [
    # Copies and barriers.
    ("decode", Edit(DECODE, "wait_for_copies<STAGES - 2>();", "wait_for_copies<STAGES - 1>();")),
    ("decode", Edit(DECODE, "    Rows<S> rows;\n    __syncthreads();\n", "    Rows<S> rows;\n")),
    (
        "decode",
        Edit(DECODE, "    wait_for_copies<0>();\n    __syncthreads();\n", "    wait_for_copies<0>();\n"),
    ),
    (
        "decode",
        Edit(DECODE, "        look_up();\n    }\n    DEVICE void look_up", "    }\n    DEVICE void look_up"),
    ),
    (
        "decode",
        Edit(DECODE, "            next += step;\n            look_up();\n", "            next += step;\n"),
    ),
    ("prefill", Edit(PREFILL, "wait_for_copies<0>();", "wait_for_copies<1>();")),
    ("prefill", Edit(PREFILL, "        __syncthreads();  // these", "        // these")),
    ("prefill", Edit(TILES, "    __syncwarp();\n    uint4* const out", "    uint4* const out")),
    ("prefill", Edit(PREFILL, "    __syncthreads();\n\n    int first_key", "\n    int first_key")),
    # Pages.
    ("decode", Edit(SHARED, "u32(i) - first < num_chunks);", "true);")),
    ("decode", Edit(SHARED, "<< a.block_shift) + (token", "<< 5) + (token")),
    ("decode", Edit("layout.cuh", "+ (chunk & (p - 1) ^ row / (8 / p) & (p - 1))", "+ (chunk & (p - 1))")),
    ("prefill", Edit(PREFILL, "threadIdx.x / 32 % PAGES * PAGE_ROWS;", "0;")),
    # Which rows see which keys.
    ("decode", Edit(SHARED, "    if (partly) mask_logits", "    if (false) mask_logits")),
    ("decode", Edit(SHARED, "position - a.window + 1, 0)", "position - a.window + 2, 0)")),
    ("decode", Edit(SHARED, "u32(position) % u32(a.chunk)", "u32(position) % u32(a.chunk - 1)")),
    ("decode", Edit(SHARED, " || key + count > all_end", "")),
    ("prefill", Edit(SHARED, "8 * n + column > last)", "8 * n + column > last + 1)")),
    ("prefill", Edit(SHARED, "first = first_key_of(a, position) - here;", "first = -here;")),
    ("prefill", Edit(SHARED, "return a.chunk ? max", "return false ? max")),
    ("prefill", Edit(SHARED, " || key + count > all_end", "")),
    ("prefill", Edit(SHARED, "first_key_of(a, last),", "first_key_of(a, first),")),
    ("prefill", Edit(SHARED, "key < end && key", "key < end - 1 && key")),
    ("prefill", Edit(SHARED, "min(first_row + count, queries.rows) - 1)", "first_row)")),
    # Later keys.
    ("two_sided", Edit(SHARED, "queries.length - 1);", "queries.length);")),
    ("two_sided", Edit(SHARED, "min(position + a.future, ", "min(position + a.future + 1, ")),
    ("two_sided", Edit(SHARED, "last_key_of<S>(a, queries, position) - here", "position - here")),
    ("two_sided", Edit(SHARED, " || key + count > all_end", "")),
    ("two_sided", Edit(SHARED, "last_key_of<S>(a, queries, last) + 1, first", "last + 1, first")),
    ("two_sided", Edit(SHARED, "return key < all_begin || ", "return ")),
    ("two_sided", Edit(SHARED, "(2 * head + 1) * a.bias_radius", "2 * head * a.bias_radius")),
    ("two_sided", Edit(SHARED, "__ldg(biases + 8 * n + column)", "__ldg(biases + 8 * n)")),
    ("two_sided", Edit(SHARED, "|| (S::TWO_SIDED && a.relative_bias)", "")),
    # Softmax.
    ("decode", Edit(SHARED, "            rows.sum[m][i] *= shrink[m][i];\n", "")),
    (
        "prefill",
        Edit(SHARED, "rows.out[m][j][i] *= shrink[m][i >> 1];", "rows.out[m][j][i] *= shrink[m][0];"),
    ),
    ("prefill", Edit(SHARED, "= max_lanes<4>(top);", "= top;")),
    (
        "decode",
        Edit(SHARED, "return softcap - __fdividef(2.0f * softcap", "return softcap - __fdividef(softcap"),
    ),
    ("decode", Edit(SHARED, "slope * float(distance + 8 * n + column)", "slope * float(distance + 8 * n)")),
    (
        "decode",
        Edit(DECODE, "const float sum = sum_lanes<4>(rows.sum[0][i]);", "const float sum = rows.sum[0][i];"),
    ),
    ("prefill", Edit(TILES, "sum_lanes<4>(rows.sum[m][i])", "rows.sum[m][i]")),
    # Rows, tiles, splits.
    ("decode", Edit(SHARED, "kv_head * group + row % group", "kv_head + row % group * 2")),
    ("decode", Edit(DECODE, "(split + 1) * share, first_group", "(split + 1) * share + WARPS, first_group")),
    (
        "decode",
        Edit(DECODE, "used_splits - 1) == u32(used_splits - 1)", "used_splits) == u32(used_splits - 1)"),
    ),
    (
        "decode",
        Edit(DECODE, "partial_out + i, 16 * D, used_splits", "partial_out + i, 16 * D, used_splits - 1"),
    ),
    ("prefill", Edit(TILES, "tile_rows) <= tile)", "tile_rows) < tile)")),
    ("prefill", Edit(TILES, "if (row >= queries.rows) break;", "")),
    # Products of warpgroups.
    ("warpgroups", Edit(WARPGROUPS, "        fence_copies();\n", "")),
    ("warpgroups", Edit(WARPGROUPS, "        wait_for_copies<0>();\n", "")),
    (
        "warpgroups",
        Edit(WARPGROUPS, "        fence_copies();\n        __syncthreads();\n", "        fence_copies();\n"),
    ),
    ("warpgroups", Edit(WARPGROUPS, "wait_for_products<1>(logits[0]);", "")),
    ("warpgroups", Edit(WARPGROUPS, "        wait_for_products<0>(rows.out[0]);\n", "")),
    ("warpgroups", Edit(WARPGROUPS, "        shrink_values<S>(rows, shrink);\n", "")),
    (
        "warpgroups",
        Edit(
            WARPGROUPS,
            "start_logits<S>(logits, own_queries, keys + (buffer ^ 1) * BUFFER)",
            "start_logits<S>(logits, own_queries, keys + buffer * BUFFER)",
        ),
    ),
    (
        "warpgroups",
        Edit(
            WARPGROUPS,
            "copy_values(values + (buffer ^ 1) * BUFFER, first_key + KEYS);",
            "copy_values(values + buffer * BUFFER, first_key + KEYS);",
        ),
    ),
    (
        "warpgroups",
        Edit(
            WARPGROUPS,
            "copy_keys(keys + buffer * BUFFER, first_key + 2 * KEYS);",
            "copy_keys(keys + (buffer ^ 1) * BUFFER, first_key + 2 * KEYS);",
        ),
    ),
    ("warpgroups", Edit(WARPGROUPS, "        value_block = key_block;\n", "")),
    (
        "warpgroups",
        Edit(
            WARPGROUPS, "key_block = find(first_key + 3 * KEYS);", "key_block = find(first_key + 2 * KEYS);"
        ),
    ),
    ("warpgroups", Edit(WARPGROUPS, "range.cuts(key, KEYS)", "range.cuts(key, 1)")),
    ("warpgroups", Edit(SHARED, "return key < all_begin || ", "return ")),
    ("warpgroups", Edit(WARPGROUPS, "warp / GROUP_WARPS * GROUP_ROWS", "warp % 2 * GROUP_ROWS")),
    (
        "warpgroups",
        Edit(
            WARPGROUPS,
            "queries + panel * ROWS * PANEL_ROW_BYTES",
            "queries + panel * GROUP_ROWS * PANEL_ROW_BYTES",
        ),
    ),
    ("warpgroups", Edit(WARPGROUPS, "describe_panels(first, PANEL_BYTES)", "describe_panels(first)")),
    ("warpgroups", Edit(WARPGROUPS, "k > 0);", "true);")),
    ("warpgroups", Edit(PRODUCTS, "swizzle(8, row, chunk % 8)", "chunk % 8")),
    ("warpgroups", Edit(PRODUCTS, "EIGHT_ROWS = 8 * PANEL_ROW_BYTES", "EIGHT_ROWS = 4 * PANEL_ROW_BYTES")),
    # Bits that do not depend on the batch.
    ("spans", Edit(SPANS, "wait_for_copies<0>();", "wait_for_copies<1>();")),
    ("spans", Edit(SPANS, "        __syncthreads();  // these", "        // these")),
    ("spans", Edit(SPANS, "    __syncthreads();\n\n    const bool divided", "\n    const bool divided")),
    ("spans", Edit(SPANS, "warp % PAGES * PAGE_ROWS, begin, end);", "0, begin, end);")),
    ("spans", Edit(SPANS, "of < PAGES ? a.k : a.v", "a.k")),
    ("spans", Edit(SPANS, "range.cuts(first_key, KEYS)", "range.cuts(first_key, 1)")),
    ("spans", Edit(SHARED, "return key < all_begin || ", "return ")),
    ("spans", Edit(SPANS, "range.meets(first_key, KEYS)", "range.meets(first_key, 1)")),
    ("spans", Edit(SPANS, "(first_key + KEYS) % SPAN == 0", "first_key % SPAN == 0")),
    ("spans", Edit(SPANS, "if (!divided && (first_key", "if (false && (first_key")),
    ("spans", Edit(SPANS, "        rows = Rows<S>();\n", "")),
    ("spans", Edit(SPANS, "added[i] = rows.top[0][i] == larger ? 1.0f :", "added[i] = true ? 1.0f :")),
    ("spans", Edit(SPANS, "kept[i] = top[i] == larger ? 1.0f :", "kept[i] = true ? 1.0f :")),
    (
        "spans",
        Edit(SPANS, "sum[i] = __fmaf_rn(sum_lanes<4>(rows.sum[0][i])", "sum[i] = __fmaf_rn(rows.sum[0][i]"),
    ),
    (
        "spans",
        Edit(SPANS, "added[i >> 1], __fmul_rn(total, kept[i >> 1])", "added[0], __fmul_rn(total, kept[0])"),
    ),
    ("spans", Edit(SPANS, "            top[i] = larger;\n", "")),
    ("spans", Edit(SPANS, "rows.sum[0][i] = lane % 4 == 0 ? sum[i] : 0.0f;", "rows.sum[0][i] = sum[i];")),
    ("spans", Edit(SPANS, "rows.sum[0][i] = lane % 4 == 0 ? both.y : 0.0f;", "rows.sum[0][i] = both.y;")),
    ("spans", Edit(SPANS, "(own_span + 1) * SPAN) : task.end", "(own_span + 1) * SPAN - 1) : task.end")),
    ("spans", Edit(SPANS, "max(task.begin, own_span * SPAN)", "max(task.begin, own_span * SPAN + 1)")),
    ("spans", Edit(SPANS, "spans - 1) == u32(spans - 1)", "spans) == u32(spans - 1)")),
    ("spans", Edit(SPANS, "place) * gridDim.z + span, lane)", "place) * gridDim.z, lane)")),
    (
        "spans",
        Edit(
            SPANS, "const int place = blockIdx.x * a.kv_heads + blockIdx.y;", "const int place = blockIdx.x;"
        ),
    ),
    (
        "spans",  # what a step masks multiplies sums by nearly 1
        Edit(
            SHARED,
            "rows.top[m][i] == top ? 1.0f : exp2_approx((rows.top[m][i] - top) * scale)",
            "exp2_approx(__fmaf_rn(rows.top[m][i], scale, offset[i]))",
        ),
    ),
    # fp8.
    (
        "decode_fp8",
        Edit(
            SHARED,
            "const uint4 even = make_uint4((x.x & 0xffff) | x.y << 16",
            "const uint4 even = make_uint4(x.x",
        ),
    ),
    ("decode_fp8", Edit(SHARED, "u32(2 * BIAS - F8_BIAS)", "u32(2 * BIAS - F8_BIAS + 1)")),
    ("decode_fp8", Edit(SHARED, "4 * (lane & 3) + 2 * i + half", "4 * (lane & 3) + 2 * half + i")),
    ("prefill_fp8", Edit(TILES, "S::NARROW ? half : 0, lane", "0, lane")),
]


@pytest.fixture(scope="module")
def right() -> None:
    """Without a fault every check passes, in every order of threads."""
    for which in ("decode", "decode_fp8", "prefill", "prefill_fp8", "two_sided", "warpgroups", "spans"):
        for order in ORDERS:
            check_all(which, EmulatedLauncher(order))


@pytest.fixture(scope="module")
def compiled() -> None:
    """All kernels with their faults, compiled several at a time: the compiler is a process of its own."""
    faulty = []
    for which, edit in FAULTS:
        cache_dtype = E4M3 if which.endswith("fp8") else BF16
        instances = [attention.decode_instance(BF16, cache_dtype, SHAPE.head_dim)]
        if which.startswith("prefill"):  # some requests of these batches have one token: they go to decode
            instances.append(attention.prefill_instance(BF16, cache_dtype, SHAPE.head_dim))
        if which == "warpgroups":
            instances.append(attention.warpgroup_instance(BF16, SHAPE.head_dim))
        if which == "two_sided":
            instances = [attention.prefill_instance(BF16, BF16, SHAPE.head_dim, two_sided=True)]
        if which == "spans":
            instances = [attention.span_instance(FP16, FP16, SHAPE.head_dim)]
        for variant in (instance.variant for instance in instances):
            if edit.file in dict(read_source(variant.source)):
                faulty.append((variant, edit))
    load_all(faulty)


def title(value: object) -> str:
    return value.old.strip()[:40] if isinstance(value, Edit) else str(value)


@pytest.mark.planted_faults
@pytest.mark.parametrize(("which", "edit"), FAULTS, ids=title)
def test_faults_are_caught(
    right: None, compiled: None, catch: Callable[..., None], which: str, edit: Edit
) -> None:
    catch(functools.partial(check_all, which), edit)
