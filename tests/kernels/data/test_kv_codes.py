"""Keys and values of 8 and 4 bits: their rows, what is lost, and equal bits from every instruction set."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.data import kv_codes
from pagewire.kernels.data.kv_codes import CODES, EIGHT_BITS, FOUR_BITS
from pagewire.kernels.data.paging import CAUSAL, Cache, LogitTerms, kv_block_bytes
from pagewire.kernels.reference.kernels import reference
from tests.kernels.batches import Request, Shape, allocate_kv, page, random_request
from tests.kernels.instruction_sets import TESTED, kernels_or_skip

SCALE = 40**-0.5


def test_an_element_is_wrong_by_half_a_scale_at_most() -> None:
    x = (
        torch.randn(500, 33, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-20, 20, 500)[:, None]
    )
    rows = kv_codes.quantise(x, EIGHT_BITS)
    assert rows.shape == (500, 33 + kv_codes.SCALE_BYTES) and rows.dtype == torch.int8
    half = x.abs().amax(1, keepdim=True) / 127 / 2
    assert ((kv_codes.dequantise(rows, torch.float32) - x).abs() <= half * 1.0001).all()
    assert (rows[:, :-4].int().abs().amax(1) == 127).all()


@pytest.mark.parametrize("size", [2, 30, 32, 34, 96, 112])
def test_an_element_of_4_bits_is_wrong_by_half_a_scale_of_its_group(size: int) -> None:
    """And by the rounding to bfloat16 of the group's range."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, size, generator=generator) * torch.logspace(-20, 20, 500)[:, None]
    x[::2] += 3 * torch.logspace(-20, 20, 500)[::2, None]  # groups without 0
    rows = kv_codes.quantise(x, FOUR_BITS)
    assert rows.shape == (500, kv_codes.row_width(size, FOUR_BITS)) and rows.dtype == torch.uint8
    kept = kv_codes.dequantise(rows, torch.float32)
    for group, of_codes in zip(x.split(32, 1), kept.split(32, 1), strict=True):
        span = group.amax(1, keepdim=True) - group.amin(1, keepdim=True)
        rounding = group.abs().amax(1, keepdim=True) * 2**-8 + span * 2**-9
        assert ((of_codes - group).abs() <= span / 15 / 2 * 1.01 + rounding).all()


def test_the_width_of_a_row_tells_the_size_of_its_head() -> None:
    for size in range(2, 600, 2):
        row = torch.empty(1, 1, 1, kv_codes.row_width(size, FOUR_BITS), dtype=FOUR_BITS)
        assert kv_codes.head_size(row) == size
    with pytest.raises(ValueError, match="needs heads of an even size, not 33"):
        kv_codes.row_width(33, FOUR_BITS)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("size", [32, 33, 34, 35])
def test_a_single_row_within_a_cache(size: int, codes: torch.dtype) -> None:
    size += size % 2 * (codes == FOUR_BITS)
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(0))
    rows = kv_codes.quantise(x, codes)
    kept = kv_codes.dequantise(rows, torch.float32)
    for row in range(2):
        assert torch.equal(kv_codes.dequantise(rows[row : row + 1], torch.float32), kept[row : row + 1])


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_zeros_and_numbers_that_are_none(codes: torch.dtype) -> None:
    x = torch.zeros(4, 8)
    x[1, 3], x[2, 3], x[3, 3] = 1e-35, torch.inf, torch.nan
    kept = kv_codes.dequantise(kv_codes.quantise(x, codes), torch.float32)
    assert not kept[:2].any() and kept[2:].isnan().all()


def test_a_block_holds_its_scales() -> None:
    assert kv_block_bytes(2, 16, (64, 32), torch.int8) == 2 * 16 * (64 + 4 + 32 + 4)
    cache = allocate_kv(3, 2, 16, 64, 32, torch.int8)
    assert cache.nbytes == 3 * kv_block_bytes(2, 16, (64, 32), torch.int8)
    assert (kv_codes.head_size(cache.k), kv_codes.head_size(cache.v)) == (64, 32)
    assert kv_block_bytes(2, 16, (64, 32), torch.uint8) == 2 * 16 * (32 + 2 * 4 + 16 + 4)
    cache = allocate_kv(3, 2, 16, 64, 32, torch.uint8)
    assert cache.nbytes == 3 * kv_block_bytes(2, 16, (64, 32), torch.uint8)
    assert (kv_codes.head_size(cache.k), kv_codes.head_size(cache.v)) == (64, 32)


@pytest.mark.parametrize("size", [24, 64, 112])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_kernels_keep_the_elements_of_the_reference(
    kernels: CpuKernels, dtype: torch.dtype, size: int
) -> None:
    """To the bit: attention over codes is that over a cache of these elements."""
    shape = Shape(1, 1, size, size)
    request = random_request(shape, 40, dtype, 0)
    request.v[3:5] = request.v[5, 0, 0]  # flat groups
    paged = page(shape, [request], [(0, 40)], store=kernels.store_kv, cache_dtype=FOUR_BITS)
    keys, values = (
        kv_codes.dequantise(kv_codes.quantise(x, FOUR_BITS), torch.float32) for x in (request.k, request.v)
    )
    stored = Request(request.q, keys.to(dtype), values.to(dtype))
    same = page(shape, [stored], [(0, 40)], store=kernels.store_kv)
    expected = kernels.paged_attention(same.q, same.cache, same.batch, SCALE)
    assert torch.equal(kernels.paged_attention(paged.q, paged.cache, paged.batch, SCALE), expected)


def attended(kernels: CpuKernels, everything: bool) -> Tensor:
    """Chunks and single tokens of four requests, with an odd head size and small granules if `everything`."""
    shape = Shape(6, 2, 33, 24, 8) if everything else Shape(6, 2, 64, 64)
    requests = [random_request(shape, 600, torch.bfloat16, seed) for seed in range(3)]
    spans = [(0, 90), (599, 600), (250, 262)]
    paged = page(shape, requests, spans, store=kernels.store_kv, cache_dtype=torch.int8)
    terms = LogitTerms(300, softcap=5.0, sinks=torch.linspace(-1, 3, 6)) if everything else CAUSAL
    return kernels.paged_attention(paged.q, paged.cache, paged.batch, SCALE, terms)


@functools.cache
def attended_by_the_best(everything: bool) -> Tensor:
    return attended(kernels_or_skip(next(iter(TESTED.values()))), everything)


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "all-options"])
def test_bits_do_not_depend_on_the_instructions(kernels: CpuKernels, everything: bool) -> None:
    """Sums are exact, and the rest is done in one order; `portable` rounds where the others fuse."""
    expected, out = attended_by_the_best(everything), attended(kernels, everything)
    if kernels.isa.name == "portable":
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=0)
    else:
        assert torch.equal(out, expected)


def test_heads_that_codes_of_16_bits_would_overflow(best_kernels: CpuKernels) -> None:
    """Equal signs and equal magnitudes: no sum of products can be larger."""
    shape = Shape(2, 1, 1024, 16)
    request = random_request(shape, 40, torch.float32, 0)
    request.q.fill_(1.0), request.k.fill_(1.0), request.v.fill_(3.0)
    request.k[7] = -1.0
    paged = page(shape, [request], [(0, 40)], store=best_kernels.store_kv, cache_dtype=torch.int8)
    out = best_kernels.paged_attention(paged.q, paged.cache, paged.batch, 1 / 1024)
    expected = reference.paged_attention(paged.q.double(), paged.plain, paged.batch, 1 / 1024)
    torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=0)


def test_what_is_not_finite_reaches_those_that_see_it(best_kernels: CpuKernels) -> None:
    shape = Shape(2, 1, 16, 16)
    request = random_request(shape, 40, torch.float32, 0)
    request.v[20, 0, 3] = torch.inf
    paged = page(shape, [request], [(0, 40)], store=best_kernels.store_kv, cache_dtype=torch.int8)
    out = best_kernels.paged_attention(paged.q, paged.cache, paged.batch, SCALE)
    assert out[:20].isfinite().all() and out[20:].isnan().all()


@pytest.mark.parametrize(
    ("codes", "least", "most"), [(EIGHT_BITS, 0.002, 0.015), (FOUR_BITS, 0.04, 0.15)], ids=str
)
def test_what_is_lost(best_kernels: CpuKernels, codes: torch.dtype, least: float, most: float) -> None:
    """In 8 bits about what rounding to bfloat16 costs, several times over; 4 bits have scales 17 times as large."""
    shape = Shape(8, 2, 64, 64)
    request = random_request(shape, 512, torch.float32, 0)
    outputs = [
        best_kernels.paged_attention(paged.q, paged.cache, paged.batch, 0.125)
        for dtype in (torch.float32, codes)
        for paged in [page(shape, [request], [(0, 512)], store=best_kernels.store_kv, cache_dtype=dtype)]
    ]
    error = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert least < error < most


def test_refusals(best_kernels: CpuKernels) -> None:
    shape = Shape()
    requests = [random_request(shape, 20, torch.bfloat16, 0)]
    codes = page(shape, requests, [(0, 20)], store=best_kernels.store_kv, cache_dtype=torch.int8)
    plain = page(shape, requests, [(0, 20)], store=best_kernels.store_kv)

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return best_kernels.paged_attention(q, Cache(k_cache, v_cache), codes.batch, 0.1)

    with pytest.raises(ValueError, match=r"keys of torch\.int8 and values of torch\.bfloat16"):
        attend(codes.q, codes.cache.k, plain.cache.v)
    nibbles = page(shape, requests, [(0, 20)], store=best_kernels.store_kv, cache_dtype=FOUR_BITS)
    with pytest.raises(ValueError, match="keys of 4 bits have no values in them"):
        attend(nibbles.q, nibbles.cache.k, nibbles.cache.k[..., : kv_codes.row_width(16, FOUR_BITS)])
    with pytest.raises(ValueError, match="shapes disagree"):
        attend(codes.q, codes.cache.k[..., 4:], codes.cache.v)
    with pytest.raises(TypeError, match=r"queries of torch\.float32, keys of torch\.bfloat16"):
        attend(codes.q.float(), plain.cache.k, plain.cache.v)
    with pytest.raises(TypeError, match=r"torch\.float32 into torch\.bfloat16"):
        k, v = (x.float() for x in (requests[0].k, requests[0].v))
        best_kernels.store_kv(k, v, plain.cache, torch.arange(20))
