"""The small compiled kernels against the reference."""

from functools import partial

import pytest
import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.data.layer import Activation, LimitedGate, Xielu
from pagewire.kernels.data.paging import Cache
from pagewire.kernels.reference.kernels import reference
from tests.kernels.batches import allocate_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 8, 24, 100, 128, 4096]
# A value on the edge between two roundings may fall to either side: one unit in the last place.
CLOSE = {
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-5},
}

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_close(out: Tensor, expected: Tensor, mostly_equal: bool = True) -> None:
    torch.testing.assert_close(out, expected, **CLOSE[out.dtype])
    if mostly_equal and out.dtype != torch.float32 and out.numel() > 1000:
        assert (out == expected).double().mean() > 0.97


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(kernels: CpuKernels, dtype: torch.dtype, offset: float) -> None:
    torch.manual_seed(0)
    for size in SIZES:
        x, weight = (3 * torch.randn(7, size)).to(dtype), torch.randn(size).to(dtype)
        out = torch.empty_like(x)
        assert kernels.rms_norm(x, weight, 1e-6, offset=offset, out=out) is out
        assert_close(out, reference.rms_norm(x, weight, 1e-6, offset=offset))
        assert torch.equal(kernels.rms_norm(x[3], weight, 1e-6, offset=offset), out[3])


def test_rms_norm_of_heads_in_a_fused_output(kernels: CpuKernels, dtype: torch.dtype) -> None:
    fused = torch.randn(6, 10 * 16).to(dtype)
    heads, weight = fused[:, 32:96].view(6, 4, 16), torch.randn(16).to(dtype)
    out = kernels.rms_norm(heads, weight, 1e-6)
    assert torch.equal(out, kernels.rms_norm(heads.contiguous(), weight, 1e-6))
    kernels.rms_norm(out, weight, 1e-6, out=out)  # in place


def test_add_rms_norm(kernels: CpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in SIZES:
        x, residual, weight = (
            torch.randn(7, size).to(dtype),
            torch.randn(7, size).to(dtype),
            torch.randn(size),
        )
        total = residual + x
        out = kernels.add_rms_norm(x, residual, weight.to(dtype), 1e-6)
        assert torch.equal(residual, total)
        assert torch.equal(out, kernels.rms_norm(total, weight.to(dtype), 1e-6))


def test_layer_norm(kernels: CpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in SIZES[1:]:
        x, residual = (1 + 3 * torch.randn(2, 7, size)).to(dtype)
        weight, bias = torch.randn(2, size).to(dtype)
        for own, other in ((None, None), (bias, residual)):
            out = kernels.layer_norm(x, weight, own, 1e-6, residual=other)
            assert_close(out, reference.layer_norm(x, weight, own, 1e-6, residual=other), mostly_equal=False)
            row = None if other is None else other[3:4]
            assert torch.equal(kernels.layer_norm(x[3:4], weight, own, 1e-6, residual=row), out[3:4])


def test_fixed_sums(kernels: CpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in SIZES:
        x = (3 * torch.randn(61, size)).to(dtype)
        ends = torch.tensor([1, 1 + 16, 60, 61])
        found, expected = (each.fixed_sums(x, ends, 2.0**30) for each in (kernels, reference))
        assert found is not None and expected is not None and torch.equal(found, expected)
        exact = [part.double().mul(2.0**30).round().long().sum(0) for part in x.split([1, 16, 43, 1])]
        assert torch.equal(found, torch.stack(exact))
        for number in (torch.nan, torch.inf):
            bad = x.clone()
            bad[40, -1] = number
            assert kernels.fixed_sums(bad, ends, 2.0**30) is None
            assert reference.fixed_sums(bad, ends, 2.0**30) is None


@pytest.mark.parametrize("activation", [a for a in Activation if a is not Activation.CLAMPED_SWIGLU])
def test_activations_of_each_element(kernels: CpuKernels, dtype: torch.dtype, activation: Activation) -> None:
    x = torch.cat([torch.linspace(-12, 12, 5003), torch.tensor([0.0, -0.0, 1e-8, -30.0, 80.0])]).to(dtype)
    out = kernels.activate_each(x, activation)
    assert_close(out, reference.activate_each(x, activation), mostly_equal=False)
    assert torch.equal(kernels.activate_each(x[17:18], activation), out[17:18])
    assert kernels.activate_each(torch.full((3,), torch.nan, dtype=dtype), activation).isnan().all()


def test_curves(kernels: CpuKernels, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-12, 12, 5003), torch.tensor([0.0, -1e-8, 1e-8, -1e-3, -80.0])]).to(dtype)
    curve = Xielu(0.9, 0.7, 0.5, -1e-6)
    out = kernels.activate_each(x, curve)
    assert_close(out, reference.activate_each(x, curve), mostly_equal=False)
    exact = reference.activate_each(x.double(), curve).to(dtype)
    torch.testing.assert_close(out, exact, **CLOSE[dtype])
    assert torch.equal(kernels.activate_each(x[17:18], curve), out[17:18])
    assert kernels.activate_each(torch.full((3,), torch.nan, dtype=dtype), curve).isnan().all()


@pytest.mark.parametrize("activation", [*Activation, LimitedGate(3.0), LimitedGate(3.0, 1.5)])
def test_gated_activations(
    kernels: CpuKernels, dtype: torch.dtype, activation: Activation | LimitedGate
) -> None:
    torch.manual_seed(0)
    for size in SIZES:
        x = (4 * torch.randn(9, 2 * size)).to(dtype)
        x[0, :size] = 100.0
        x[1, :size] = -100.0
        ours = partial(kernels.activate_and_mul, activation=activation)
        expected = reference.activate_and_mul(x, activation)
        torch.testing.assert_close(
            ours(x), expected, rtol=CLOSE[dtype]["rtol"], atol=2e-3 if dtype != torch.float32 else 1e-5
        )
        assert torch.equal(ours(x[2:3]), ours(x)[2:3])


def test_rotary_is_exact(kernels: CpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size, rot_dim in ((128, 128), (64, 64), (80, 32), (20, 6)):
        fused = torch.randn(11, 8 * size).to(dtype)
        q, k = fused[:, : 5 * size].view(11, 5, size), fused[:, 5 * size :].view(11, 3, size)
        angles = torch.randn(11, rot_dim // 2).repeat(1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        expected = q.clone(), k.clone()
        reference.rotary(*expected, cos, sin)
        kernels.rotary(q, k, cos, sin)
        assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])


def pair_of(kernels: CpuKernels, dtype: torch.dtype) -> int:
    """How many elements a cache keeps side by side: bfloat16 goes in pairs, float16 where tiles multiply it."""
    tiles_of_halves = "-DPAGEWIRE_TILES_FP16" in kernels.isa.compiler_flags
    return 2 if dtype == torch.bfloat16 or (dtype == torch.float16 and tiles_of_halves) else 1


def arranged(cache: Cache, pair: int) -> tuple[Tensor, Tensor]:
    """Caches as the reference fills them, in the order in which the compiled kernels read them (`layout.h`)."""
    num_blocks, num_heads, block_size, _ = cache.k.shape
    granule = min(16, block_size & -block_size)
    k = cache.k.view(num_blocks, num_heads, block_size // granule, granule, -1, pair).transpose(3, 4)
    v = cache.v.view(num_blocks, num_heads, block_size // pair, pair, -1).transpose(3, 4)
    return k.reshape(cache.k.shape), v.reshape(cache.v.shape)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("block_size", [8, 16, 24, 32])
def test_store_kv(kernels: CpuKernels, dtype: torch.dtype, block_size: int, in_turn: bool) -> None:
    """In any order, and in turn: whole granules, some of which are cut, not in order or not stored."""
    torch.manual_seed(0)
    for num_tokens, k_size, v_size in ((5, 8, 13), (300, 64, 64), (300, 36, 19)):
        fused = torch.randn(num_tokens, 3 * (k_size + v_size)).to(dtype)
        k = fused[:, : 3 * k_size].view(num_tokens, 3, k_size)
        v = fused[:, 3 * k_size :].view(num_tokens, 3, v_size)
        slots = torch.randperm(40 * block_size)[:num_tokens]
        if in_turn and 100 < num_tokens < 40 * block_size - 11:
            slots = torch.arange(11, 11 + num_tokens)
            slots[70:72] = slots[70:72].flip(0)
            slots[100] = -1
        else:
            slots[::4] = -1
        cache, plain = (allocate_kv(40, 3, block_size, k_size, v_size, dtype) for _ in range(2))
        kernels.store_kv(k, v, cache, slots)
        reference.store_kv(k, v, plain, slots)
        wanted = arranged(plain, pair_of(kernels, dtype))
        assert torch.equal(cache.k, wanted[0]) and torch.equal(cache.v, wanted[1])
        with pytest.raises(IndexError):
            kernels.store_kv(k, v, cache, slots + 40 * block_size)
        with pytest.raises(ValueError, match="contiguous"):
            strided = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (cache.k, cache.v))
            kernels.store_kv(k, v, Cache(*strided), slots)


def test_pairs_need_even_blocks(kernels: CpuKernels, dtype: torch.dtype) -> None:
    k, cache = torch.ones(1, 2, 8, dtype=dtype), allocate_kv(3, 2, 5, 8, 8, dtype)
    slot = torch.tensor([4])
    if pair_of(kernels, dtype) == 2:
        with pytest.raises(ValueError, match="even"):
            kernels.store_kv(k, k, cache, slot)
    else:
        kernels.store_kv(k, k, cache, slot)
        assert cache.k.sum() == k.sum()


def test_conversions_round_as_torch_does(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Seen through a rotation that halves: subnormals, ties, infinities, NaN."""
    values = torch.tensor(
        [0.0, 1e-8, 6e-8, 6.1e-5, 1e-6, 0.1, 1.0, 65504.0, 65519.0, 3e38, float("inf"), float("nan")]
    )
    values = torch.cat([values, -values, torch.randn(200).exp2() * torch.randn(200)]).to(dtype)
    cos, sin = torch.full((1, 2), 0.5, dtype=dtype), torch.zeros(1, 2, dtype=dtype)
    x = values.reshape(1, -1, 2).clone()
    kernels.rotary(x, x.clone(), cos, sin)
    expected = values.reshape(1, -1, 2).clone()
    reference.rotary(expected, expected.clone(), cos, sin)
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


def test_mixed_dtypes_and_float64_go_to_the_reference(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 8).to(dtype), torch.randn(8, dtype=torch.float64)
    assert ops.rms_norm(x, weight, 1e-6).dtype == dtype
    assert ops.activate_and_mul(x.double(), Activation.SILU).dtype == torch.float64
