"""Keys and values of 8 bits: their rows, what is lost, and equal bits from every instruction set."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.data import kv_codes
from pagewire.kernels.data.paging import CAUSAL, Cache, LogitTerms, kv_block_bytes
from pagewire.kernels.reference.kernels import reference
from tests.kernels.batches import Shape, allocate_kv, page, random_request
from tests.kernels.instruction_sets import TESTED, kernels_or_skip

SCALE = 40**-0.5


def test_an_element_is_wrong_by_half_a_scale_at_most() -> None:
    x = (
        torch.randn(500, 33, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-20, 20, 500)[:, None]
    )
    rows = kv_codes.quantise(x)
    assert rows.shape == (500, 33 + kv_codes.SCALE_BYTES) and rows.dtype == torch.int8
    half = x.abs().amax(1, keepdim=True) / 127 / 2
    assert ((kv_codes.dequantise(rows, torch.float32) - x).abs() <= half * 1.0001).all()
    assert (rows[:, :-4].int().abs().amax(1) == 127).all()


@pytest.mark.parametrize("size", [32, 33, 34, 35])
def test_a_single_row_within_a_cache(size: int) -> None:
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(0))
    rows = kv_codes.quantise(x)
    kept = kv_codes.dequantise(rows, torch.float32)
    for row in range(2):
        assert torch.equal(kv_codes.dequantise(rows[row : row + 1], torch.float32), kept[row : row + 1])


def test_zeros_and_numbers_that_are_none() -> None:
    x = torch.zeros(4, 8)
    x[1, 3], x[2, 3], x[3, 3] = 1e-35, torch.inf, torch.nan
    kept = kv_codes.dequantise(kv_codes.quantise(x), torch.float32)
    assert not kept[:2].any() and kept[2:].isnan().all()


def test_a_block_holds_its_scales() -> None:
    assert kv_block_bytes(2, 16, (64, 32), torch.int8) == 2 * 16 * (64 + 4 + 32 + 4)
    cache = allocate_kv(3, 2, 16, 64, 32, torch.int8)
    assert cache.nbytes == 3 * kv_block_bytes(2, 16, (64, 32), torch.int8)
    assert (kv_codes.head_size(cache.k), kv_codes.head_size(cache.v)) == (64, 32)


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


def test_what_is_lost(best_kernels: CpuKernels) -> None:
    """About what rounding to bfloat16 costs, several times over, against float64 on what was stored."""
    shape = Shape(8, 2, 64, 64)
    request = random_request(shape, 512, torch.float32, 0)
    outputs = [
        best_kernels.paged_attention(paged.q, paged.cache, paged.batch, 0.125)
        for dtype in (torch.float32, torch.int8)
        for paged in [page(shape, [request], [(0, 512)], store=best_kernels.store_kv, cache_dtype=dtype)]
    ]
    error = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert 0.002 < error < 0.015


def test_refusals(best_kernels: CpuKernels) -> None:
    shape = Shape()
    requests = [random_request(shape, 20, torch.bfloat16, 0)]
    codes = page(shape, requests, [(0, 20)], store=best_kernels.store_kv, cache_dtype=torch.int8)
    plain = page(shape, requests, [(0, 20)], store=best_kernels.store_kv)

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return best_kernels.paged_attention(q, Cache(k_cache, v_cache), codes.batch, 0.1)

    with pytest.raises(ValueError, match=r"keys of torch\.int8 and values of torch\.bfloat16"):
        attend(codes.q, codes.cache.k, plain.cache.v)
    with pytest.raises(ValueError, match="shapes disagree"):
        attend(codes.q, codes.cache.k[..., 4:], codes.cache.v)
    with pytest.raises(TypeError, match=r"queries of torch\.float32, keys of torch\.bfloat16"):
        attend(codes.q.float(), plain.cache.k, plain.cache.v)
    with pytest.raises(TypeError, match=r"torch\.float32 into torch\.bfloat16"):
        k, v = (x.float() for x in (requests[0].k, requests[0].v))
        best_kernels.store_kv(k, v, plain.cache, torch.arange(20))
