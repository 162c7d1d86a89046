"""The compiled attention kernel against the reference, and its promise on bits."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.data.kv_codes import CODES, EIGHT_BITS, FOUR_BITS
from pagewire.kernels.data.paging import CAUSAL, WHOLE, Cache, LogitTerms
from pagewire.kernels.reference.kernels import reference
from tests.kernels.batches import TOLERANCE, Paged, Request, Shape, page, random_request

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CACHED = [(dtype, cached or dtype) for cached in (None, *CODES) for dtype in DTYPES]
"""Dtypes of a model with those of its cache."""
WITH_BYTES = CACHED[:4]
WITH_NIBBLES = [*WITH_BYTES, *CACHED[-3:]]
LENGTH = 600  # more than two of the kernel's KV tiles


def by_distance(num_heads: int) -> Tensor:
    """Random biases of all distances within `LENGTH`."""
    return torch.randn(num_heads, 2 * 768, generator=torch.Generator().manual_seed(0))


def everything(num_heads: int) -> LogitTerms:
    return LogitTerms(
        window=300,
        softcap=5.0,
        sinks=torch.linspace(-1, 3, num_heads),
        alibi=torch.logspace(-3, -1, num_heads),
        relative_bias=by_distance(num_heads),
    )


def run(kernels: CpuKernels, paged: Paged, terms: LogitTerms = CAUSAL) -> Tensor:
    return kernels.paged_attention(paged.q, paged.cache, paged.batch, paged.q.shape[2] ** -0.5, terms)


def run_on(num_threads: int, kernels: CpuKernels, paged: Paged, terms: LogitTerms = CAUSAL) -> Tensor:
    """The same on some number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return run(kernels, paged, terms)
    finally:
        torch.set_num_threads(before)


def check(kernels: CpuKernels, paged: Paged, terms: LogitTerms = CAUSAL, padding: int = 0) -> None:
    """Compares with the reference; the batch's last `padding` rows hold NaN and come out as 0."""
    out = run(kernels, paged, terms)
    q, plain = paged.q.double(), paged.plain
    if plain.k.is_floating_point():
        plain = Cache(plain.k.double(), plain.v.double())
    expected = reference.paged_attention(q, plain, paged.batch, q.shape[2] ** -0.5, terms)
    # Queries become codes of 16 bits, each to within 1.5e-5 of the largest: some 2e-4 of a score if all errors
    # add up, which counts most where few keys have all the weight. Probabilities add less.
    tolerance = TOLERANCE[out.dtype] + (6e-4 if plain.k.dtype == EIGHT_BITS else 0.0)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)
    assert not out[len(out) - padding :].any()


SIZES = [
    (8, 8),
    (24, 24),
    (64, 64),
    (80, 80),
    (96, 64),
    (112, 112),
    (128, 128),
    (192, 128),
    (256, 256),
    (13, 5),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_head_sizes(kernels: CpuKernels, sizes: tuple[int, int]) -> None:
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=sizes[0], v_head_dim=sizes[1])
    for dtype, cache_dtype in CACHED:
        if cache_dtype == FOUR_BITS and sizes[0] % 2:
            continue
        requests = [random_request(shape, 70, dtype, seed) for seed in range(2)]
        spans = [(0, 70), (68, 69)]
        check(kernels, page(shape, requests, spans, store=kernels.store_kv, cache_dtype=cache_dtype))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_ragged_batches(kernels: CpuKernels, data: st.DataObject) -> None:
    num_kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    num_heads = num_kv_heads * data.draw(st.sampled_from([1, 2, 5, 7]))
    dtype, cache_dtype = data.draw(st.sampled_from(CACHED))
    odd = 34 if cache_dtype == FOUR_BITS else 33
    shape = Shape(
        num_heads,
        num_kv_heads,
        head_dim=data.draw(st.sampled_from([16, 40, odd])),
        v_head_dim=data.draw(st.sampled_from([16, 24, odd])),
        block_size=data.draw(st.sampled_from([2, 8, 16, 20, 64, 128])),
    )
    terms = LogitTerms(
        window=data.draw(st.none() | st.integers(1, LENGTH)),
        softcap=data.draw(st.none() | st.just(5.0)),
        sinks=data.draw(st.none() | st.just(torch.linspace(-2, 2, num_heads))),
        alibi=data.draw(st.none() | st.just(torch.logspace(-3, -1, num_heads))),
        relative_bias=data.draw(st.none() | st.just(by_distance(num_heads))),
        chunk=data.draw(st.none() | st.integers(1, LENGTH)),
    )
    length = st.integers(1, LENGTH) | st.sampled_from([16, 255, 256, 257, 512])
    ends = data.draw(st.lists(length, min_size=1, max_size=4))
    spans = [(data.draw(st.integers(max(0, end - 40), end)), end) for end in ends]
    padding = data.draw(st.integers(0, 2))
    requests = [random_request(shape, end, dtype, seed) for seed, end in enumerate(ends)]
    paged = page(shape, requests, spans, padding=padding, store=kernels.store_kv, cache_dtype=cache_dtype)
    check(kernels, paged, terms, padding)


@pytest.mark.parametrize(("dtype", "cache_dtype"), WITH_BYTES, ids=str)
@pytest.mark.parametrize("sizes", [(576, 512, 16), (40, 24, 20), (27, 10, 64)], ids=str)
def test_values_that_are_a_part_of_keys(
    kernels: CpuKernels, dtype: torch.dtype, cache_dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    """As if they had been stored once more, to the bit: rows of single tokens, of chunks, and with a window."""
    head_dim, v_head_dim, block_size = sizes
    shape = Shape(5, 1, head_dim, v_head_dim, block_size, values_in_keys=True)
    requests = [random_request(shape, end, dtype, seed) for seed, end in enumerate((300, 263, 1))]
    for terms in (CAUSAL, LogitTerms(window=70)):
        layout = {"padding": 1, "store": kernels.store_kv, "cache_dtype": cache_dtype}
        spans = [(299, 300), (230, 263), (0, 1)]
        paged = page(shape, requests, spans, **layout)  # type: ignore[arg-type]
        check(kernels, paged, terms, padding=1)
        if cache_dtype == dtype:  # in int8 the values have scales of their own then
            apart = dataclasses.replace(shape, values_in_keys=False)
            again = page(apart, requests, spans, **layout)  # type: ignore[arg-type]
            assert torch.equal(run(kernels, paged, terms), run(kernels, again, terms))


@pytest.mark.parametrize(("dtype", "cache_dtype"), WITH_BYTES, ids=str)
def test_only_chosen_keys_are_seen(kernels: CpuKernels, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Of two KV tiles some or none, and among them keys that a token does not see anyway, or that do not exist."""
    shape = Shape(5, 1, 40, 24, values_in_keys=True)
    requests = [random_request(shape, end, dtype, seed) for seed, end in enumerate((300, 263, 5))]
    spans = [(299, 300), (230, 263), (0, 5)]
    paged = page(shape, requests, spans, padding=1, store=kernels.store_kv, cache_dtype=cache_dtype)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(230, generator=generator)[:9].sort().values for _ in range(40)]
    rows[0] = torch.arange(290, 299)  # none of the first tile's
    rows[34:39] = [torch.arange(9)] * 5
    chosen = torch.stack(rows).int()
    check(kernels, paged, LogitTerms(chosen=chosen), padding=1)
    everything_seen = LogitTerms(chosen=torch.arange(300).int().expand(40, 300))
    assert torch.equal(run(kernels, paged, everything_seen), run(kernels, paged))
    backwards = LogitTerms(chosen=chosen.flip(1).sub(500))  # wrong ones, but nothing else is read
    assert run(kernels, paged, backwards).shape == paged.q.shape[:2] + (24,)
    with pytest.raises(ValueError, match="chosen keys of 40 tokens"):
        run(kernels, paged, LogitTerms(chosen=chosen[1:]))


def whole(
    kernels: CpuKernels, shape: Shape, request: Request, terms: LogitTerms, cache_dtype: torch.dtype
) -> Tensor:
    """Every position of a request, computed in one step, alone."""
    spans = [(0, len(request.q))]
    return run(kernels, page(shape, [request], spans, store=kernels.store_kv, cache_dtype=cache_dtype), terms)


@pytest.mark.parametrize(("dtype", "cache_dtype"), WITH_NIBBLES, ids=str)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "all-options"])
def test_bits_do_not_depend_on_the_batch(
    kernels: CpuKernels, dtype: torch.dtype, cache_dtype: torch.dtype, plain: bool
) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=40, v_head_dim=32)
    terms = CAUSAL if plain else everything(shape.num_heads)
    requests = [random_request(shape, LENGTH, dtype, seed) for seed in range(4)]
    expected = [whole(kernels, shape, request, terms, cache_dtype) for request in requests]
    # One token each; chunks that straddle tiles; nothing; other pages.
    for spans in (
        [(599, 600), (256, 257), (0, 1), (300, 301)],
        [(0, 255), (255, 258), (258, 600), (511, 514)],
        [(100, 100), (0, 600), (599, 600), (17, 90)],
    ):
        for num_threads in (1, 2, 3):
            layout = {"padding": 1, "seed": num_threads, "cache_dtype": cache_dtype}
            paged = page(shape, requests, spans, store=kernels.store_kv, **layout)  # type: ignore[arg-type]
            out = run_on(num_threads, kernels, paged, terms)
            slices = [rows[begin:end] for rows, (begin, end) in zip(expected, spans, strict=True)]
            assert torch.equal(out[:-1], torch.cat(slices))


def test_bits_of_a_long_context_split_over_threads(best_kernels: CpuKernels) -> None:
    """Cut into many tasks, whose partial results are merged, or computed in one go: the same."""
    shape = Shape(num_heads=4, num_kv_heads=1, head_dim=64, v_head_dim=64)
    long, short = (random_request(shape, length, torch.bfloat16, length) for length in (5000, 10))
    alone = page(shape, [long], [(4999, 5000)], store=best_kernels.store_kv)
    expected = run_on(1, best_kernels, alone)
    for num_threads in (2, 8):
        assert torch.equal(run_on(num_threads, best_kernels, alone), expected)
    crowd = page(shape, [long, *[short] * 30], [(4990, 5000), *[(0, 10)] * 30], store=best_kernels.store_kv)
    assert torch.equal(run_on(2, best_kernels, crowd)[9:10], expected)
    check(best_kernels, alone)


def test_strided_queries(best_kernels: CpuKernels) -> None:
    """q may be a view of a fused QKV output."""
    shape = Shape()
    request = random_request(shape, 50, torch.bfloat16, 0)
    paged = page(shape, [request], [(0, 50)], store=best_kernels.store_kv)
    fused = torch.randn(50, 3 * 4 * 32).to(torch.bfloat16)
    view = fused[:, 128:256].view(50, 4, 32)
    view.copy_(paged.q)
    assert not view.is_contiguous()
    strided = run(best_kernels, dataclasses.replace(paged, q=view))
    assert torch.equal(strided, run(best_kernels, paged))


def test_out_is_filled_and_returned() -> None:
    shape = Shape()
    paged = page(shape, [random_request(shape, 20, torch.float32, 0)], [(0, 20)])
    out = torch.empty(20, 4, 32)
    result = ops.paged_attention(paged.q, paged.cache, paged.batch, 0.1, out=out)
    assert result is out
    again = ops.paged_attention(paged.q, paged.cache, paged.batch, 0.1)
    assert torch.equal(out, again)


def test_empty_batches(kernels: CpuKernels) -> None:
    shape = Shape()
    request = random_request(shape, 20, torch.float32, 0)
    paged = page(shape, [request], [(20, 20)], store=kernels.store_kv)
    assert run(kernels, paged).shape == (0, 4, 32)


def test_refuses_what_does_not_fit(best_kernels: CpuKernels) -> None:
    shape = Shape()
    paged = page(shape, [random_request(shape, 20, torch.float32, 0)], [(0, 20)], store=best_kernels.store_kv)

    def changed(**fields: Tensor) -> Paged:
        return dataclasses.replace(paged, batch=dataclasses.replace(paged.batch, **fields))

    for wrong in (
        changed(seq_lens=torch.tensor([19], dtype=torch.int32)),
        changed(seq_lens=torch.tensor([2**30], dtype=torch.int32)),
        changed(block_table=paged.batch.block_table * 0 + 99),
        changed(query_start_loc=torch.tensor([0, 21], dtype=torch.int32)),
        dataclasses.replace(paged, q=paged.q[:, :3]),
        dataclasses.replace(paged, cache=Cache(paged.cache.k[..., :16], paged.cache.v)),
    ):
        with pytest.raises(ValueError):
            run(best_kernels, wrong)
    for shape_of_bias in ((4, 510), (3, 512), (4, 513), (2, 4, 512)):
        with pytest.raises(ValueError):
            run(best_kernels, paged, LogitTerms(relative_bias=torch.zeros(shape_of_bias)))
    with pytest.raises(ValueError, match="too small for 20 tokens"):
        paged_on = page(shape, [random_request(shape, 20, torch.float64, 0)], [(0, 20)])
        terms = LogitTerms(relative_bias=torch.zeros(4, 32))
        ops.paged_attention(paged_on.q, paged_on.cache, paged_on.batch, 0.1, terms)
    with pytest.raises(TypeError):
        run(best_kernels, changed(seq_lens=torch.tensor([20])))
    with pytest.raises(NotImplementedError):
        meta = torch.empty(20, 4, 32, device="meta")
        ops.paged_attention(meta, Cache(meta, meta), paged.batch, 1.0)


def test_float64_goes_to_the_reference() -> None:
    shape = Shape()
    paged = page(shape, [random_request(shape, 20, torch.float64, 0)], [(0, 20)])
    out = ops.paged_attention(paged.q, paged.cache, paged.batch, 0.1)
    assert out.dtype == torch.float64 and out.isfinite().all()


@pytest.mark.parametrize(("window", "future"), [(None, WHOLE), (65, 64), (None, 3)], ids=str)
def test_queries_that_see_later_keys(kernels: CpuKernels, window: int | None, future: int) -> None:
    """As in encoders: against the reference, and the same bits alone and in a batch."""
    terms = LogitTerms(window, future)
    lengths = (600, 1, 256, 257, 70)
    for dtype in DTYPES:
        shape = Shape(head_dim=40, v_head_dim=40)
        requests = [random_request(shape, length, dtype, length) for length in lengths]
        paged = page(shape, requests, [(0, length) for length in lengths], store=kernels.store_kv)
        check(kernels, paged, terms)
        together = run_on(2, kernels, paged, terms)
        alone = [whole(kernels, shape, request, terms, dtype) for request in requests]
        assert torch.equal(together, torch.cat(alone))


def test_the_reference_of_later_keys_is_dense_attention() -> None:
    shape = Shape(num_heads=2, num_kv_heads=2)
    request = random_request(shape, 300, torch.float64, 0)
    paged = page(shape, [request], [(0, 300)])
    q, k, v = (x.transpose(0, 1) for x in (request.q, request.k, request.v))
    out = ops.paged_attention(paged.q, paged.cache, paged.batch, 0.2, LogitTerms.two_sided())
    expected = torch.softmax(q @ k.transpose(1, 2) * 0.2, -1) @ v
    torch.testing.assert_close(out.transpose(0, 1), expected, atol=1e-10, rtol=0)
