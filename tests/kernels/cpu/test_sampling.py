"""The compiled kernels that look through logits against the reference."""

import math

import numpy as np
import pytest
import torch

from pagewire.kernels import ops
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.data.drawing import FRACTION_BITS, Draw
from pagewire.kernels.reference.kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 3, 16, 100, 4096, 4097, 32001]

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("size", SIZES)
def test_largest(kernels: CpuKernels, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(9, size + 5).to(dtype)[:, :size]
    x[1] = -3.0  # all tie, and all are below the padding of a last vector
    x[2] = -math.inf
    x[3, size // 2 :] = 50.0  # ties: the lowest column counts
    x[4, -1] = math.inf
    x[5], x[5, -1] = -0.0, 0.0  # equal numbers
    values, columns = kernels.largest(x)
    expected_values, expected_columns = reference.largest(x)
    assert torch.equal(values, expected_values) and values.dtype == torch.float32
    assert torch.equal(columns, expected_columns)
    assert columns[3] == size // 2 and columns[1] == columns[2] == columns[5] == 0


def test_a_nan_is_found_wherever_it_is(kernels: CpuKernels, dtype: torch.dtype) -> None:
    x = torch.randn(40, 5000).to(dtype)
    for row, column in enumerate(torch.randint(5000, (40,)).tolist()):
        x[row, column] = math.nan
    x[7] = 1.0
    for implementation in (kernels, reference):
        assert implementation.largest(x)[0].isnan().tolist() == [row != 7 for row in range(40)]


def test_other_dtypes_and_no_rows(kernels: CpuKernels, dtype: torch.dtype) -> None:
    assert ops.largest(torch.tensor([[1.0, 3.0, 3.0]], dtype=torch.float64))[1].tolist() == [1]
    assert kernels.largest(torch.empty(0, 7, dtype=dtype))[1].tolist() == []


def random_masks(rows: int, size: int) -> torch.Tensor:
    """Packed bits: everything, nothing, one column, the last one, and halves, a word at a time and bit by bit."""
    words = -(-size // 32)
    bits = torch.randint(-(2**31), 2**31, (rows, words), dtype=torch.int64).to(torch.int32)
    bits[0], bits[1], bits[2], bits[3] = -1, 0, 0, 0
    bits[2, (size // 2) // 32] = 1 << (size // 2) % 32 if (size // 2) % 32 < 31 else -(2**31)
    bits[3, -1] = 1 << (size - 1) % 32 if (size - 1) % 32 < 31 else -(2**31)
    bits[4, ::2] = 0
    return bits


@pytest.mark.parametrize("size", SIZES)
def test_only_what_is_allowed_counts(kernels: CpuKernels, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(9, size + 5).mul(2).round().to(dtype)[:, :size]  # many ties
    x[5] = -math.inf
    allowed = random_masks(9, size)
    columns = torch.arange(size)
    kept = (allowed[:, columns // 32] >> (columns % 32) & 1).bool()
    expected = x.float().masked_fill(~kept, -math.inf)
    for implementation in (kernels, reference):
        masked = implementation.only_allowed(x, allowed)
        assert torch.equal(masked, expected) and masked.dtype == torch.float32
        values, found = implementation.largest(x, allowed)
        assert torch.equal(values, expected.amax(1))
        for row in range(9):
            first = (expected[row] == values[row]).nonzero()[0, 0]
            assert values[row] == -math.inf or found[row] == first
    assert torch.equal(kernels.only_allowed(x[:1], allowed[:1]), x[:1].float())


def test_a_nan_counts_only_where_it_is_allowed(kernels: CpuKernels, dtype: torch.dtype) -> None:
    x = torch.randn(2, 100).to(dtype)
    x[:, 70] = math.nan
    allowed = torch.full((2, 4), -1, dtype=torch.int32)
    allowed[0, 2] = 0
    for implementation in (kernels, reference):
        assert implementation.largest(x, allowed)[0].isnan().tolist() == [False, True]


def test_masks_of_another_shape_are_refused(kernels: CpuKernels, dtype: torch.dtype) -> None:
    x = torch.randn(2, 100).to(dtype)
    for wrong in (
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(1, 4, dtype=torch.int32),
        torch.zeros(2, 4),
    ):
        with pytest.raises(ValueError, match="masks are int32"):
            kernels.largest(x, wrong)


def literal_mass(depth: float) -> int:
    """The definition, one rounded operation after another."""
    f = np.float32
    d = min(f(depth), f(32))
    n = f(np.rint(d * f(1.44269504)))
    r = (n * f(0.693359375) - d) + n * f(-2.12194440e-4)
    p = f(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + f(c)
    p = (p * (r * r) + r) + f(1)
    return int(math.ldexp(float(p), FRACTION_BITS - int(n)))


@pytest.mark.parametrize("size", SIZES)
def test_fixed_point_probabilities(kernels: CpuKernels, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    depths = (torch.rand(size) * 40).to(dtype).float()
    depths[::7] *= 2.0**-20
    depths[-1], depths[0] = math.inf, 0.0
    masses = kernels.fixed_point_probabilities(depths)
    assert torch.equal(masses, reference.fixed_point_probabilities(depths))
    assert masses[:200].tolist() == [literal_mass(depth) for depth in depths[:200].tolist()]
    assert masses[0] == 2**FRACTION_BITS
    ordered, places = depths.sort()
    assert (masses[places].diff() <= 0).all()
    exact = torch.exp(-ordered.double()) * 2**FRACTION_BITS
    assert ((masses[places] - exact).abs() <= exact * 8e-8 + 1).all()


def random_draw(random: np.random.Generator, size: int) -> Draw:
    """Any seed, position, temperature and truncation."""
    return Draw(
        seed=int(random.integers(-(2**63), 2**63 - 1)),
        position=int(random.integers(0, 2**40)),
        temperature=float(random.choice([1e-30, 1e-3, 0.3, 1.0, 5.0, 1e30])),
        top_k=int(random.choice([0, 0, 1, 5, 40, size, size + 7])),
        top_p=float(random.choice([1.0, 1.0, 1e-9, 0.1, 0.9, 0.999])),
        min_p=float(random.choice([0.0, 0.0, 1e-4, 0.1, 1.0])),
    )


@pytest.mark.parametrize("spread", [0.0, 0.1, 4.0, 30.0])
@pytest.mark.parametrize("size", SIZES)
def test_draws_are_those_of_the_reference(
    kernels: CpuKernels, dtype: torch.dtype, size: int, spread: float
) -> None:
    """With ties, with logits that exclude tokens, and with truncation of every kind."""
    torch.manual_seed(size)
    random = np.random.default_rng([size, int(10 * spread)])
    x = (spread * torch.randn(12, size + 3)).to(dtype)[:, :size]
    x[3, torch.rand(size) < 0.5] = -math.inf
    x[4] = x[4].round()
    x[3, 0] = 1.0
    peaks, _ = reference.largest(x)
    draws = [random_draw(random, size) for _ in range(12)]
    assert kernels.draw(x, peaks, draws) == reference.draw(x, peaks, draws)
    assert kernels.draw(x[:0], peaks[:0], []) == []


def test_draws_that_do_not_fit_the_rows(kernels: CpuKernels, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 8, dtype=dtype)
    with pytest.raises(ValueError, match="2 rows with 1 peaks"):
        kernels.draw(x, torch.zeros(1), [Draw(1, 0, 1.0)] * 2)
    with pytest.raises(ValueError, match="and 1 draws"):
        kernels.draw(x, torch.zeros(2), [Draw(1, 0, 1.0)])
