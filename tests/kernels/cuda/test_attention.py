"""Paged attention, emulated, against the reference."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.cuda import attention
from pagewire.kernels.cuda.compile import OLDEST
from pagewire.kernels.cuda.launch import HOPPER
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.data.paging import CAUSAL, UNSCALED, Cache, KVScales, LogitTerms
from pagewire.kernels.reference.kernels import reference
from tests.kernels.batches import TOLERANCE, Paged, Shape, page, random_request
from tests.kernels.cuda.emulate import ORDERS, EmulatedLauncher

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
LONGEST = 700  # keys: several parts, and several rounds of a ring


def everything(num_heads: int, dtype: torch.dtype = torch.float32) -> LogitTerms:
    return LogitTerms(
        window=300,
        softcap=5.0,
        sinks=torch.linspace(-1, 3, num_heads).to(dtype),
        alibi=torch.logspace(-3, -1, num_heads).to(dtype),
    )


def run(
    launcher: EmulatedLauncher,
    paged: Paged,
    terms: LogitTerms,
    cache_dtype: torch.dtype,
    scales: KVScales = UNSCALED,
    invariant: bool = False,
) -> Tensor:
    """The kernels' output for a batch. All memory that they have not written holds NaN."""
    workspace = attention.Workspace.allocate(launcher.multiprocessors, "cpu")
    workspace.outputs.fill_(torch.nan)
    workspace.sums.fill_(torch.nan)
    k, v = (exchange_chunks(x.to(cache_dtype)) for x in (paged.plain.k, paged.plain.v))
    guarded = torch.full((len(paged.q) + 128, *paged.q.shape[1:]), torch.nan, dtype=paged.q.dtype)
    out = guarded[64:-64]
    scale = paged.q.shape[2] ** -0.5
    cache = Cache(k, v, scales)
    attention.paged_attention(
        launcher, workspace, paged.q, cache, paged.batch, scale, terms, out, invariant=invariant
    )
    assert not workspace.arrivals.any(), "the next launch would start from a wrong count"
    assert guarded[:64].isnan().all() and guarded[-64:].isnan().all(), "written beyond the end"
    return out


def expect(paged: Paged, terms: LogitTerms, cache_dtype: torch.dtype, scales: KVScales = UNSCALED) -> Tensor:
    """The reference's output in float64, from the keys and values as the cache holds them."""
    plain, scale = paged.plain, paged.q.shape[2] ** -0.5
    cache = Cache(plain.k.to(cache_dtype).double() * scales.k, plain.v.to(cache_dtype).double() * scales.v)
    return reference.paged_attention(paged.q.double(), cache, paged.batch, scale, terms)


def check(
    launcher: EmulatedLauncher,
    paged: Paged,
    terms: LogitTerms,
    cache_dtype: torch.dtype,
    scales: KVScales = UNSCALED,
    invariant: bool = False,
) -> None:
    out = run(launcher, paged, terms, cache_dtype, scales, invariant)
    expected = expect(paged, terms, cache_dtype, scales)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[out.dtype], rtol=0)


def batch_of(
    spans: list[tuple[int, int]], shape: Shape, dtype: torch.dtype = BF16, padding: int = 0, seed: int = 0
) -> Paged:
    requests = [random_request(shape, end, dtype, seed + i) for i, (_, end) in enumerate(spans)]
    return page(shape, requests, spans, padding=padding, seed=seed)


PAIRS = [(dtype, cache) for dtype in (BF16, FP16) for cache in (dtype, E4M3, E5M2)]
INSTANCES = [(BF16, BF16, size) for size in attention.HEAD_DIMS]
INSTANCES += [(*pair, 64) for pair in PAIRS[1:]] + [(BF16, E4M3, 80), (BF16, E4M3, 256)]
KINDS = [(OLDEST, *kinds) for kinds in INSTANCES]
KINDS += [(HOPPER, *kinds) for kinds in INSTANCES if attention.has_warpgroups(HOPPER, *kinds)]


@pytest.mark.parametrize(("capability", "dtype", "cache_dtype", "head_dim"), KINDS, ids=str)
def test_variants(
    capability: tuple[int, int], dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int
) -> None:
    """Every head size, every pair of types: decode and mixed batches, plain, with all options, in chunks."""
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=head_dim, v_head_dim=head_dim)
    launcher = EmulatedLauncher(order=ORDERS[2], capability=capability)
    for spans in (
        [(0, 1), (40, 41), (0, 0), (LONGEST - 2, LONGEST)],
        [(0, 60), (0, 0), (399, 400), (130, 240)],
    ):
        paged = batch_of(spans, shape, dtype, padding=2)
        check(launcher, paged, CAUSAL, cache_dtype)
        check(launcher, paged, everything(6, dtype), cache_dtype)
        check(launcher, paged, LogitTerms(chunk=90), cache_dtype)


@pytest.mark.parametrize(("dtype", "cache_dtype", "head_dim"), INSTANCES, ids=str)
def test_variants_whose_bits_do_not_depend_on_the_batch(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int
) -> None:
    """Spans one behind the other, and each by a block of its own."""
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=head_dim, v_head_dim=head_dim)
    for spans in (
        [(0, 1), (40, 41), (0, 0), (1098, 1100)],
        [(0, 60), (0, 0), (599, 600), (430, 540)],
    ):
        paged = batch_of(spans, shape, dtype, padding=2)
        for terms in (CAUSAL, everything(6, dtype), LogitTerms(chunk=90)):
            check(EmulatedLauncher(order=ORDERS[2]), paged, terms, cache_dtype, invariant=True)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Shape, list[list[tuple[int, int]]], LogitTerms, torch.dtype]:
    """Steps in which the first request is at some of its tokens, beside others; the last steps reach its end."""
    kv_heads, group = draw(st.sampled_from([(2, 1), (2, 3), (1, 16), (1, 20)]))
    dtype = draw(st.sampled_from([BF16, E4M3]))
    terms = LogitTerms(
        window=draw(st.none() | st.integers(1, 1200)),
        softcap=draw(st.none() | st.floats(1, 50)),
        sinks=draw(st.sampled_from([None, torch.linspace(-3, 5, kv_heads * group)])),
        alibi=draw(st.sampled_from([None, torch.logspace(-3, -1, kv_heads * group)])),
        chunk=draw(st.none() | st.integers(1, 1200)),
    )
    end, steps = draw(st.integers(520, 1200)), []
    for _ in range(3):
        first = end - draw(st.integers(1, 40) | st.just(1))
        others = draw(st.lists(st.tuples(st.integers(0, 700), st.integers(1, 70)), max_size=2))
        steps.append([(first, end), *((start, start + count) for start, count in others)])
    return Shape(kv_heads * group, kv_heads, 64, 64), steps, terms, dtype


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(cuts())
def test_no_bit_depends_on_the_batch(
    cut: tuple[Shape, list[list[tuple[int, int]]], LogitTerms, torch.dtype],
) -> None:
    """Alone and among others, in chunks of any length, spans in turn and in blocks of their own."""
    shape, steps, terms, cache_dtype = cut
    same = random_request(shape, steps[0][0][1], BF16, seed=1)
    found: dict[int, Tensor] = {}
    for number, spans in enumerate(steps):
        others = [random_request(shape, end, BF16, seed=number + 2) for _, end in spans[1:]]
        paged = page(shape, [same, *others], spans, seed=number)
        for multiprocessors in (1, 60):  # which has room for blocks of all spans
            launcher = EmulatedLauncher(order=ORDERS[number], multiprocessors=multiprocessors)
            out = run(launcher, paged, terms, cache_dtype, invariant=True)
            for token in range(*spans[0]):
                bits = out[token - spans[0][0]].view(torch.int16)
                assert torch.equal(found.setdefault(token, bits), bits)


def test_scales_of_keys_and_values() -> None:
    """In decode, split or not, and in prefill; with a softcap and a sink, which they do not touch."""
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=64, v_head_dim=64)
    for spans in ([(40, 41), (LONGEST - 1, LONGEST)], [(0, 60), (399, 400)]):
        paged = batch_of(spans, shape, padding=2)
        for terms in (CAUSAL, everything(6)):
            check(EmulatedLauncher(order=ORDERS[2]), paged, terms, E4M3, KVScales(0.37, 2.5))


def test_a_cache_of_16_bits_takes_no_scales() -> None:
    paged = batch_of([(0, 1)], Shape())
    with pytest.raises(ValueError, match="takes no KVScales"):
        run(EmulatedLauncher(), paged, CAUSAL, BF16, KVScales(0.5, 1.0))


@st.composite
def batches(draw: st.DrawFn, max_queries: int) -> tuple[Paged, LogitTerms, torch.dtype]:
    """A batch, terms, and the dtype of the cache. max_queries: per request; 0 for the limit of decode."""
    kv_heads, group = draw(st.sampled_from([(4, 1), (2, 4), (1, 7), (1, 16), (1, 20)]))
    heads = kv_heads * group
    limit = max_queries or max(1, attention.TILE_ROWS // group)
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        queries = draw(st.integers(0, limit) | st.just(1))
        start = draw(st.integers(0, LONGEST - queries) | st.just(0))
        spans.append((start, start + queries))
    dtype, cache_dtype = draw(st.sampled_from([(BF16, BF16), (FP16, E4M3)]))
    terms = LogitTerms(
        window=draw(st.none() | st.integers(1, LONGEST)),
        softcap=draw(st.none() | st.floats(1, 50)),
        sinks=draw(st.sampled_from([None, torch.linspace(-3, 5, heads)])),
        alibi=draw(st.sampled_from([None, torch.logspace(-3, -1, heads)])),
        chunk=draw(st.none() | st.integers(1, LONGEST)),
    )
    shape = Shape(heads, kv_heads, 64, 64, draw(st.sampled_from(attention.BLOCK_SIZES)))
    paged = batch_of(spans, shape, dtype, draw(st.integers(0, 3)), draw(st.integers(0, 1000)))
    return paged, terms, cache_dtype


launchers = st.builds(
    EmulatedLauncher,
    order=st.sampled_from(ORDERS),
    multiprocessors=st.integers(1, 9),
    capability=st.sampled_from([OLDEST, HOPPER]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(launchers, batches(0))
def test_decode(launcher: EmulatedLauncher, batch: tuple[Paged, LogitTerms, torch.dtype]) -> None:
    """Ragged lengths, several tokens per request as in speculation, no tokens, padding; MHA, GQA and MQA."""
    check(launcher, *batch)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(launchers, batches(200))
def test_mixed(launcher: EmulatedLauncher, batch: tuple[Paged, LogitTerms, torch.dtype]) -> None:
    """Prompts and chunks of prompts in a batch with decode."""
    check(launcher, *batch)


def test_the_output_of_an_empty_batch_is_padding() -> None:
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64)
    paged = batch_of([(0, 1)], shape, padding=3)
    none = torch.zeros(0, dtype=torch.int32)
    batch = dataclasses.replace(
        paged.batch,
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=none,
        block_table=none[:, None],
    )
    out = run(EmulatedLauncher(), dataclasses.replace(paged, batch=batch), CAUSAL, BF16)
    assert not out.any()


@pytest.mark.parametrize("tiles", [1, 8, 64, 300, 512, 2000, 100000])
@pytest.mark.parametrize("longest", [1, 600, 4096, 131072])
def test_splits_fill_the_device(tiles: int, longest: int) -> None:
    """Parts fit into the workspace, none is too short, and the last round is not nearly empty."""
    multiprocessors = 132
    splits = attention.choose_splits(tiles, multiprocessors, longest)
    assert splits == 1 or splits * tiles <= attention.PARTS * multiprocessors
    assert splits == 1 or (splits - 1) * attention.PART_KEYS < longest
    slots = attention.RESIDENT * multiprocessors
    if longest >= 4096 and tiles <= 512:
        busy = splits * tiles / (-(-splits * tiles // slots) * slots)
        assert busy > 0.75 or splits * attention.PART_KEYS >= 0.9 * longest


def test_refusals() -> None:
    """Arguments that no kernel supports are refused by name, before a launch."""
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64)
    paged = batch_of([(4, 5)], shape)
    k, v = paged.cache.k, paged.cache.v
    good = {"q": paged.q, "cache": paged.cache, "batch": paged.batch, "scale": 1.0}
    launcher = EmulatedLauncher()
    workspace = attention.Workspace.allocate(launcher.multiprocessors, "cpu")
    wide = paged.q.repeat(1, 1, 2)
    bad: list[tuple[type[Exception], str, dict[str, object]]] = [
        (TypeError, "no kernel for queries of torch.float32", {"q": paged.q.float()}),
        (TypeError, "keys of torch.float16", {"cache": Cache(k.half(), v)}),
        (ValueError, "same shape and dtype", {"cache": Cache(k, v.half())}),
        (ValueError, "no kernel for q", {"q": wide}),
        (ValueError, "no kernel for q", {"q": paged.q[:, :3]}),
        (ValueError, "strides", {"q": wide[:, :, ::2]}),
        (ValueError, "aligned", {"q": wide[:, :, 4:68]}),
        (ValueError, "sinks", {"terms": LogitTerms(sinks=torch.zeros(3))}),
        (TypeError, "sinks", {"terms": LogitTerms(alibi=torch.zeros(4, dtype=torch.float64))}),
        (ValueError, "above 0", {"terms": LogitTerms(window=0)}),
        (ValueError, "above 0", {"scale": 0.0}),
        (ValueError, "above 0", {"terms": LogitTerms(chunk=0)}),
        (ValueError, "out", {"out": torch.empty(1, 4, 65, dtype=BF16)}),
        (
            TypeError,
            "int32",
            {"batch": dataclasses.replace(paged.batch, seq_lens=paged.batch.seq_lens.long())},
        ),
        (
            ValueError,
            "same batch",
            {"batch": dataclasses.replace(paged.batch, seq_lens=torch.ones(2, dtype=torch.int32))},
        ),
    ]
    for error, message, changed in bad:
        with pytest.raises(error, match=message):
            attention.paged_attention(launcher, workspace, **{**good, **changed})  # type: ignore[arg-type]
