"""Products with quantised weights: every instruction set, emulated tiles and the reference have the same bits."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.quantised import QuantisedLinear
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.integers import SCALE_DTYPES, Integers, integer_weight, quantise
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.kernels.reference.kernels import reference
from pagewire.kernels.reference.quantised import _fma, quantised_linear

TABLE = (0, 255, 127, 128, 3, 90, 17, 254, 200, 1, 64, 129, 33, 250, 99, 180)
SCHEMES = (
    *(Integers(8, None, 128), Integers(8, 32, 128), Integers(8, 16, 0), Integers(8, 128, 255)),
    *(Integers(6, None, 32), Integers(6, 16, 32), Integers(6, 32, 0), Integers(6, 128, 33)),
    *(Integers(4, None, 8), Integers(4, 32, 8), Integers(4, 32, 0), Integers(4, 64, 8), Integers(4, 128, 8)),
    *(Integers(4, 16, 0), Integers(4, 32, 127, TABLE), Integers(4, None, 128, TABLE)),
)
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 33, 70)


def random_weight(
    scheme: Integers,
    n: int,
    k: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    offsets: bool,
    seed: int = 0,
) -> Weight:
    """Codes of every value, which multiply to the largest sums that there can be."""
    generator = torch.Generator().manual_seed(seed)
    most = 64 if scheme.bits == 6 else 256
    codes = torch.randint(0, most, (n, k // scheme.per_byte), generator=generator, dtype=torch.uint8)
    shape = (n, k // (scheme.group or k))
    scales = (torch.rand(shape, generator=generator) + 0.1).to(scale_dtype)
    with_offsets = torch.randn(shape, generator=generator).to(scale_dtype) if offsets else None
    return integer_weight(scheme, codes, scales, with_offsets, dtype)


def random_rows(count: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Rows of different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, k, generator=generator) * torch.rand(count, 1, generator=generator) * 4).to(
        dtype
    )


def same(a: Tensor, b: Tensor) -> bool:
    """Whether the numbers are equal, and NaN in the same places."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name[:20])
@pytest.mark.parametrize("offsets", [False, True], ids=["", "offsets"])
def test_bits_are_those_of_the_reference(kernels: CpuKernels, scheme: Integers, offsets: bool) -> None:
    """For every number of rows, dtype and dtype of scales; the last panel is not full."""
    for i, dtype in enumerate(DTYPES):
        n, k = 75, (256, 384, 640)[i]
        weight = random_weight(scheme, n, k, dtype, SCALE_DTYPES[i], offsets)
        bias = torch.randn(n).to(dtype) if i else None
        x = random_rows(max(ROWS), k, dtype)
        linear, wanted = kernels.pack(weight, bias), quantised_linear(x, weight, bias)
        assert isinstance(linear, QuantisedLinear) and wanted.isfinite().all()
        for count in ROWS:
            assert torch.equal(linear(x[:count]), wanted[:count]), count


@st.composite
def products(draw: st.DrawFn) -> tuple[Weight, Tensor]:
    """A weight of any scheme and shape, and rows for it."""
    scheme = draw(st.sampled_from(SCHEMES))
    step = scheme.group or scheme.per_byte
    k, n, rows = (draw(st.integers(1, most)) for most in (max(1, 600 // step), 150, 80))
    dtype, scale_dtype = draw(st.sampled_from(list(DTYPES))), draw(st.sampled_from(SCALE_DTYPES))
    seed = draw(st.integers(0, 100))
    weight = random_weight(scheme, n, k * step, dtype, scale_dtype, draw(st.booleans()), seed)
    return weight, random_rows(rows, k * step, dtype, seed)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(product=products(), data=st.data())
def test_any_product_in_any_company(
    kernels: CpuKernels, product: tuple[Weight, Tensor], data: st.DataObject
) -> None:
    """Some rows' bits are the same among others, at another place, on more threads, and by the reference."""
    weight, x = product
    linear = kernels.pack(weight)
    whole = linear(x)
    assert same(whole, quantised_linear(x, weight))
    picked = torch.tensor(data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=70)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.integers(1, 4)))
        assert torch.equal(linear(x[picked]), whole[picked])
    finally:
        torch.set_num_threads(before)


def test_large_products_on_all_threads(kernels: CpuKernels) -> None:
    """Several chunks of rows, many panels, and rows that are quantised by several threads."""
    for scheme in (Integers(8, None, 128), Integers(4, 32, 8)):
        weight = random_weight(scheme, 300, 1088, torch.bfloat16, torch.float16, False)
        x, linear = random_rows(450, 1088, torch.bfloat16), kernels.pack(weight)
        whole = linear(x)
        assert torch.equal(whole, quantised_linear(x, weight))
        assert torch.equal(torch.cat([linear(row[None]) for row in x[380:390]]), whole[380:390])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name[:20])
def test_it_is_near_the_product_with_the_dense_weight(best_kernels: CpuKernels, scheme: Integers) -> None:
    weight = random_weight(scheme, 64, 1024, torch.float32, torch.float32, True)
    x = random_rows(50, 1024, torch.float32)
    exact = functional.linear(x.double(), weight.dense().double())
    assert (best_kernels.pack(weight)(x) - exact).norm() < 0.015 * exact.norm()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name[:20])
def test_an_outlier_costs_the_others_nothing(best_kernels: CpuKernels, scheme: Integers) -> None:
    """A row's largest element sets no group's scale; where it sets the row's, finer codes make up for it."""
    weight = random_weight(scheme, 64, 1024, torch.float32, torch.float32, True)
    x, linear = random_rows(50, 1024, torch.float32), best_kernels.pack(weight)
    x[:, 300] = 0
    alone = functional.linear(x.double(), weight.dense().double())
    x[:, 300] = torch.where(torch.arange(50) % 2 == 0, 300.0, -300.0)
    exact = functional.linear(x.double(), weight.dense().double())
    assert (linear(x) - exact).norm() < 0.015 * alone.norm()


def test_a_row_that_is_not_finite_is_nan_and_no_other_is(kernels: CpuKernels) -> None:
    for scheme in (Integers(8, None, 128), Integers(4, 32, 8), Integers(8, 16, 0)):
        weight = random_weight(scheme, 70, 128, torch.bfloat16, torch.float16, True)
        x = random_rows(20, 128, torch.bfloat16)
        linear, clean = kernels.pack(weight), x.clone()
        x[3, 77], x[5, 0], x[6, 127] = math.nan, math.inf, -math.inf
        found = linear(x)
        spoilt = torch.tensor([3, 5, 6])
        assert found[spoilt].isnan().all()
        keep = torch.ones(20, dtype=torch.bool).index_fill(0, spoilt, False)
        assert torch.equal(found[keep], linear(clean)[keep])
        assert linear(x[3:4]).isnan().all()
        assert same(found, quantised_linear(x, weight))


def test_zeros_and_tiny_numbers(kernels: CpuKernels) -> None:
    weight = random_weight(Integers(8, 32, 128), 40, 96, torch.float32, torch.float32, True)
    x = random_rows(4, 96, torch.float32)
    x[0] = 0
    x[1, :32] = 0
    x[2] *= 1e-38  # the inverse of such a scale is no float32
    x[3, 1:] = 1e-45
    found = kernels.pack(weight)(x)
    assert torch.equal(found, quantised_linear(x, weight))
    assert found[0].eq(0).all() and found[1].ne(0).any() and found.isfinite().all()


def test_any_strides_and_dimensions(best_kernels: CpuKernels) -> None:
    weight = random_weight(Integers(4, 32, 8), 100, 64, torch.bfloat16, torch.float16, False)
    linear, x = best_kernels.pack(weight), random_rows(40, 64, torch.bfloat16)
    wanted = linear(x)
    wide = torch.full((len(x), 80), 7.0).bfloat16()
    wide[:, 5:69] = x
    assert torch.equal(linear(wide[:, 5:69]), wanted)
    assert torch.equal(linear(x.T.contiguous().T), wanted)
    assert torch.equal(linear(x.view(4, 10, 64)), wanted.view(4, 10, 100))
    assert torch.equal(linear(x[3]), wanted[3])
    assert linear(x[:0]).shape == (0, 100)
    transposed = dataclasses.replace(weight, parts=tuple(part.T.contiguous().T for part in weight.parts))
    assert torch.equal(best_kernels.pack(transposed)(x), wanted)


def test_packed_bytes_are_used_again(best_kernels: CpuKernels) -> None:
    weight = random_weight(Integers(4, 64, 128, TABLE), 1100, 64, torch.bfloat16, torch.bfloat16, True)
    bias = torch.randn(1100).bfloat16()
    first = best_kernels.pack(weight, bias)
    assert isinstance(first, QuantisedLinear)
    again = QuantisedLinear.of_packed(*best_kernels.packing, first.packed.clone(), first.form, bias)
    x = random_rows(9, 64, torch.bfloat16)
    assert (
        torch.equal(again(x), first(x)) and again.num_bytes == first.num_bytes == first.packed.nbytes + 2200
    )
    with pytest.raises(ValueError, match="packed bytes expected"):
        QuantisedLinear.of_packed(*best_kernels.packing, first.packed[:-1], first.form, bias)


def test_what_does_not_fit_is_refused(best_kernels: CpuKernels) -> None:
    weight = quantise(dense_weight(torch.randn(8, 64)), Integers(8, 32, 128))
    for linear in (best_kernels.pack(weight), reference.pack(weight)):
        for wrong in (torch.zeros(2, 63), torch.zeros(2, 64).double()):
            with pytest.raises(ValueError, match=r"rows of 64 torch.float32 expected"):
                linear(wrong)
    with pytest.raises(ValueError, match="weight of shape"):
        best_kernels.pack(weight, torch.zeros(7))


def test_the_reference_packs_and_is_as_invariant() -> None:
    weight = random_weight(Integers(4, 32, 0), 50, 96, torch.bfloat16, torch.float16, True)
    bias, x = torch.randn(50).bfloat16(), random_rows(30, 96, torch.bfloat16)
    linear = reference.pack(weight, bias)
    assert linear.num_bytes == weight.num_bytes + 100
    assert torch.equal(linear(x), quantised_linear(x, weight, bias))
    assert torch.equal(linear(x[7]), linear(x)[7]) and linear(x[:0]).shape == (0, 50)


def test_the_reference_rounds_a_sum_of_a_product_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(300, generator=generator) for _ in range(3))
    c[:100] *= torch.exp2(torch.linspace(-40, 40, 100))
    b[100:200], c[100:200] = a[100:200], -(a[100:200] ** 2)  # what is left is the rounding of the square
    a[200:], c[200:] = 1 + 2.0**-12, torch.where(c[200:] > 0, 2.0**-40, -(2.0**-40))
    b[200:] = 1 + 2.0**-12  # a product between two numbers of float32, and a sum just beside it
    for found, *terms in zip(_fma(a, b, c).tolist(), a.tolist(), b.tolist(), c.tolist(), strict=True):
        x, y, z = map(Fraction, terms)
        exact, value = x * y + z, torch.tensor(found)
        for other in (math.inf, -math.inf):
            neighbour = Fraction(torch.nextafter(value, torch.tensor(other)).item())
            assert abs(Fraction(found) - exact) <= abs(neighbour - exact)
    special = _fma(torch.tensor([math.inf, math.nan, 0.0]), torch.ones(3), torch.ones(3))
    assert special[0] == math.inf and special[1].isnan() and special[2] == 1
