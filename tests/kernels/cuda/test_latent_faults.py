"""Faults planted in the kernels of latents: every fault must change the output or be reported by the emulation."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cuda import latents
from pagewire.kernels.cuda.launch import HOPPER
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.cuda.source import Variant, read_source
from pagewire.kernels.data.paging import CAUSAL, Cache, LogitTerms
from tests.kernels.batches import TOLERANCE, Paged
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, guarded
from tests.kernels.cuda.emulate.library import load_all
from tests.kernels.cuda.test_attention import BF16, batch_of
from tests.kernels.cuda.test_latents import chosen_keys, expect, run, shape_of

DECODED = batch_of([(0, 1), (40, 41), (0, 0), (1100, 1101)], shape_of(5), padding=2)
DRAFTED = batch_of([(0, 5), (40, 45), (797, 800)], shape_of(16), padding=2)
PROMPTS = batch_of([(0, 14), (0, 0), (120, 122), (60, 75)], shape_of(7, block_size=32), padding=2)
Case = tuple[Paged, LogitTerms]
SINKS = LogitTerms(sinks=torch.linspace(-2, 5, 70))
MANY_HEADS = batch_of([(0, 1), (290, 292), (599, 600)], shape_of(70), padding=1)
HALF_CHOSEN = batch_of([(90, 100), (0, 0), (0, 3)], shape_of(16), padding=2, seed=13)  # block 0 is free
LISTS = torch.tensor([0, 3, 17, 40, 89, 95, 98, 99, 150, 160]).int().repeat(15, 1)
few: list[Case] = [(DECODED, CAUSAL), (DECODED, LogitTerms(window=70))]
many: list[Case] = [(DRAFTED, CAUSAL), (PROMPTS, CAUSAL), (PROMPTS, LogitTerms(window=40))]
chosen: list[Case] = [
    (DECODED, LogitTerms(chosen=guarded(chosen_keys(DECODED, 600)))),
    (MANY_HEADS, LogitTerms(chosen=guarded(chosen_keys(MANY_HEADS, 300)))),
    (HALF_CHOSEN, LogitTerms(chosen=guarded(LISTS))),
]
sinks: list[Case] = [(MANY_HEADS, SINKS), (MANY_HEADS, replace(SINKS, chosen=chosen_keys(MANY_HEADS, 40)))]


@functools.cache
def expected(which: str, number: int) -> Tensor:
    return expect(*globals()[which][number])


def check_all(which: str, launcher: EmulatedLauncher) -> None:
    launcher = dataclasses.replace(launcher, multiprocessors=20)  # for several splits
    for number, case in enumerate(globals()[which]):
        out = run(launcher, *case)
        torch.testing.assert_close(out.double(), expected(which, number), atol=TOLERANCE[BF16], rtol=0)


def check_write(launcher: EmulatedLauncher) -> None:
    """Two pages among four, and tokens that end within a block of threads."""
    rows = guarded(torch.arange(5 * 288).view(5, 1, 288).to(BF16))
    slots = torch.tensor([63, -1, 32, 5, 17])
    pages = torch.full((4, 1, 32, 288), torch.nan, dtype=BF16)
    wanted = pages.clone().view(128, 288)
    latents.write(launcher, rows, Cache.of_keys(pages[1:3], 256), guarded(slots))
    wanted[32 + slots[[0, 2, 3, 4]]] = rows[[0, 2, 3, 4], 0]
    torch.testing.assert_close(exchange_chunks(pages).view(128, 288), wanted, rtol=0, atol=0, equal_nan=True)


FILE, PARTS, MERGE = "latent_attention.cu", "latents.cuh", "merge_latents.cu"
FAULTS = [
    # Copies and barriers.
    ("few", Edit(FILE, "wait_for_copies<0>();", "wait_for_copies<1>();")),
    ("few", Edit(FILE, "__syncthreads();  // these keys", "// these keys")),
    ("many", Edit(FILE, "__syncthreads();  // all groups", "// all groups")),
    ("many", Edit(FILE, "__syncthreads();  // the weights are", "// the weights are")),
    ("many", Edit(FILE, "__syncthreads();  // the last factors", "// the last factors")),
    ("many", Edit(FILE, "    __syncthreads();\n    const i64 place", "    const i64 place")),
    ("many", Edit(FILE, "    __syncthreads();\n    uint4* const out", "    uint4* const out")),
    ("many", Edit(FILE, "copy(buffers + (buffer ^ 1) * BUFFER, ", "copy(buffers + buffer * BUFFER, ")),
    # Pages.
    ("few", Edit(FILE, "warp : thread / COPIERS)", "warp : 0)")),
    ("few", Edit(FILE, "opaque(thread) % COPIERS", "opaque(thread) % 32")),
    ("few", Edit(FILE, "find(first_key + KEYS);\n    load", "load")),
    ("few", Edit(FILE, "            find(first_key + 2 * KEYS);\n", "")),
    ("few", Edit(FILE, "swizzle(S::CHUNKS, row, 2 * k + (lane >> 3))", "2 * k + (lane >> 3)")),
    # Which rows see which keys.
    ("few", Edit(FILE, "parts.keys.cuts(first_key, KEYS)", "parts.keys.cuts(first_key, 1)")),
    ("few", Edit(FILE, "parts.keys.cuts(first_key, KEYS)", "parts.keys.cuts(first_key + KEYS - 1, 1)")),
    ("many", Edit(FILE, "first_row + tile_row, first_key + group", "first_row, first_key + group")),
    ("many", Edit(FILE, "first_key + group * S::KEYS, opaque", "first_key, opaque")),
    ("few", Edit("attention.cuh", "position - a.window + 1, 0)", "position - a.window + 2, 0)")),
    ("many", Edit(PARTS, "queries, first_row, rows)), first", "queries, first_row, 1)), first")),
    # Logits and weights.
    (
        "few",
        Edit(
            FILE,
            "query_fragment<S>(a[1], queries, first_row, k + 1,",
            "query_fragment<S>(a[1], queries, first_row, k,",
        ),
    ),
    ("few", Edit(FILE, "a[1], b + 2);", "a[1], b);")),
    (
        "many",
        Edit(FILE, "multiply_latents<S>(logits, staged, tile_row,", "multiply_latents<S>(logits, staged, 0,"),
    ),
    ("many", Edit(FILE, "keys + group * S::KEYS * S::ROW_BYTES, opaque", "keys, opaque")),
    (
        "few",
        Edit(FILE, "tops[group * ROWS + row + 8 * i] = top[0][i];", "tops[group * ROWS + row] = top[0][i];"),
    ),
    ("few", Edit(FILE, "fmaxf(top[0][i], tops[other * ROWS + row + 8 * i])", "top[0][i]")),
    (
        "many",
        Edit(FILE, "weight_place(row + 8 * i, group * (S::KEYS / 8) + n)", "weight_place(row + 8 * i, n)"),
    ),
    ("many", Edit(FILE, "factors[row + 8 * i] = shrink[0][i];", "factors[row + 8 * i] = shrink[0][0];")),
    # Values.
    ("many", Edit(FILE, "factors[16 * m + 8 * i + lane / 4];", "factors[16 * m + lane / 4];")),
    ("many", Edit(FILE, "        shrink_values<V>(rows, shrinks);\n", "")),
    (
        "many",
        Edit(
            FILE,
            "weight_place(16 * m + (lane & 15), 2 * k + (lane >> 4))",
            "weight_place(16 * m + (lane & 15), lane >> 4)",
        ),
    ),
    ("many", Edit(FILE, "keys + k * 16 * S::ROW_BYTES + warp", "keys + warp")),
    ("many", Edit(FILE, " + warp * V::D * int(sizeof(T));", ";")),
    # Sums and outputs.
    ("few", Edit(FILE, "sum_lanes<4>(softmax.sum[0][i])", "softmax.sum[0][i]")),
    ("few", Edit(FILE, "sum += tops[other * ROWS + row];", "sum = tops[other * ROWS + row];")),
    ("few", Edit(FILE, "softmax.top[0][i] * exponent_scale<S>(a);", "softmax.top[0][i];")),
    ("many", Edit(FILE, "warp * (V::D / 8) + j;", "j;")),
    ("many", Edit(FILE, "swizzle(OUT_CHUNKS, row, chunk)) * 4", "chunk) * 4")),
    ("many", Edit(FILE, "min(queries.rows - first_row, ROWS) * OUT_CHUNKS", "ROWS * OUT_CHUNKS")),
    ("many", Edit(FILE, "a.heads + first_row) * OUT_CHUNKS", "a.heads) * OUT_CHUNKS")),
    ("few", Edit("prefill.cuh", "clear_padding<OUT_CHUNKS>", "clear_padding<S::Q_CHUNKS>")),
    # Parts.
    ("few", Edit(PARTS, "- first + share - 1) / share;", "- first + share - 1) / share + 1;")),
    ("few", Edit(FILE, "parts.first + part * parts.share;", "parts.first;")),
    ("few", Edit(FILE, "min(parts.first + (part + 1) * parts.share, parts.keys.end)", "parts.keys.end")),
    ("few", Edit(FILE, "    if (part >= parts.used) return;\n", "")),
    ("few", Edit(FILE, "(i64(blockIdx.x) * a.splits + part) * ROWS", "i64(blockIdx.x) * a.splits * ROWS")),
    ("few", Edit(FILE, "            if (parts.used == 1) {\n", "            {\n")),
    (
        "few",
        Edit(MERGE, "i64(blockIdx.x) * a.splits * ROWS + blockIdx.y", "i64(blockIdx.x) * a.splits * ROWS"),
    ),
    ("few", Edit(MERGE, "ROWS * RANK, parts.used);", "ROWS * RANK, parts.used - 1);")),
    ("few", Edit(MERGE, "    if (row >= queries.rows) return;\n", "")),
    ("few", Edit(MERGE, "    if (parts.used == 1) return;\n", "")),
    # Chosen keys.
    ("chosen", Edit(FILE, "CHOSEN ? warp :", "CHOSEN ? 0 :")),
    ("chosen", Edit(PARTS, "min(position + 1, a.num_chosen);", "min(position, a.num_chosen);")),
    ("chosen", Edit(PARTS, "if (high <= 0 || __ldg(chosen + high - 1) <= position) return", "return")),
    ("chosen", Edit(PARTS, "(__ldg(chosen + middle) <= position)", "(__ldg(chosen + middle) < position)")),
    ("chosen", Edit(PARTS, "position_of(number / tiles * queries.group)", "position_of(0)")),
    ("chosen", Edit(PARTS, "        queries.start = token;\n", "")),
    ("chosen", Edit(PARTS, "        queries.rows = queries.group;\n", "")),
    ("chosen", Edit(PARTS, "first_row = number % tiles * ROWS;", "first_row = 0;")),
    ("chosen", Edit(PARTS, "    if (number >= end) return -1;\n", "")),
    ("chosen", Edit(PARTS, "i64(queries.start) * a.num_chosen + number", "number")),
    ("chosen", Edit(PARTS, "i64(queries.request) * a.table_width", "i64(queries.start) * a.table_width")),
    ("chosen", Edit(PARTS, "+ (position >> a.block_shift)", "+ (number >> a.block_shift)")),
    ("chosen", Edit(PARTS, "(position & ((1", "(number & ((1")),
    ("chosen", Edit(PARTS, "swizzle(S::CHUNKS, to, chunk)", "swizzle(S::CHUNKS, from, chunk)")),
    ("chosen", Edit(PARTS, "swizzle(S::CHUNKS, from, chunk)", "swizzle(S::CHUNKS, to, chunk)")),
    ("chosen", Edit(PARTS, "from >= 0);", "true);")),
    ("chosen", Edit("prefill.cuh", "(group + tile_rows - 1) / tile_rows)", "group / tile_rows + 1)")),
    ("chosen", Edit(MERGE, "request_of<CHOSEN>", "request_of")),
    ("chosen", Edit(MERGE, "first_tile<CHOSEN>", "first_tile")),
    # Sinks.
    ("sinks", Edit(FILE, "head_of(min(first_row + row,", "head_of(min(row,")),
    ("sinks", Edit(FILE, "sum * weight + exp2_approx(sink - larger)", "sum * weight")),
    ("sinks", Edit(MERGE, "merged.result(sink)", "merged.result(MINUS_INFINITY)")),
    # The write.
    ("write", Edit("kv.cu", "if (token >= p.num_tokens || ", "if (")),
    ("write", Edit("kv.cu", " || p.slots[token] < 0) return;", ") return;")),
    ("write", Edit("kv.cu", "slot, slot % p.block_size,", "slot, 0,")),
    ("write", Edit("kv.cu", "chunks = p.size / 8, token", "chunks = 32, token")),
]


def check_of(which: str) -> Callable[[EmulatedLauncher], None]:
    return check_write if which == "write" else functools.partial(check_all, which)


@pytest.fixture(scope="module")
def right() -> None:
    """Without a fault every check passes, in every order of threads."""
    for which in ("few", "many", "chosen", "sinks", "write"):
        for order in ORDERS:
            check_of(which)(EmulatedLauncher(order))


@pytest.fixture(scope="module")
def compiled() -> None:
    """All kernels with their faults, compiled several at a time: the compiler is a process of its own."""
    load_all(
        [
            (variant, edit)
            for which, edit in FAULTS
            for variant in kernels_of(which)
            if edit.file in dict(read_source(variant.source))
        ]
    )


def kernels_of(which: str) -> list[Variant]:
    """The kernels that a check launches."""
    if which == "write":
        return [latents.writing(BF16)]
    few, many = latents.FEW, latents.many(HOPPER, BF16, 288)
    tilings = {"few": [few], "chosen": [few, many]}.get(which, [many])
    return [
        kernel(BF16, 288, tiling, chosen=chosen).variant
        for kernel in (latents.instance, latents.merging)
        for tiling in tilings
        for chosen in {"chosen": [True], "sinks": [False, True]}.get(which, [False])
    ]


def title(value: object) -> str:
    return value.old.strip()[:40] if isinstance(value, Edit) else str(value)


@pytest.mark.planted_faults
@pytest.mark.parametrize(("which", "edit"), FAULTS, ids=title)
def test_faults_are_caught(
    right: None, compiled: None, catch: Callable[..., None], which: str, edit: Edit
) -> None:
    catch(check_of(which), edit)
