"""Numbers to integers with scales, and back: every instruction set has the bits of plain torch (`integers.py`)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewire.kernels import linear
from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.integers import SCALE_DTYPES, Integers, integer_weight, quantise
from pagewire.kernels.data.weight import DENSE, Weight, dense_weight
from tests.kernels.cpu.test_quantised import SCHEMES, random_weight

TARGETS = (
    *(
        Integers(8, 32, 128),
        Integers(8, 16, 128),
        Integers(8, None, 128),
        Integers(8, 64, 0),
        Integers(8, None, 0),
    ),
    *(Integers(6, 32, 32), Integers(6, 16, 0), Integers(6, None, 32)),
    *(
        Integers(4, 32, 0),
        Integers(4, 128, 8),
        Integers(4, None, 8),
        Integers(4, None, 0),
        Integers(4, 16, 0),
    ),
)
TABLE = Integers(4, 64, 128, tuple(range(8, 248, 15)))


def numbers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of every magnitude: zeros of both signs, one sign, halfway between codes, tiny and huge numbers."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x *= torch.logspace(-6, 3, rows)[:, None]
    x[1] = 0
    x[2] = -x[2].abs()
    x[3] = x[3].abs()
    x[4] = torch.arange(columns) % 256 / 2 - 64  # ties
    x[5, ::2] = 0
    x[5, 1::2] = -0.0
    x[6] *= torch.finfo(dtype).tiny
    x[7] = x[7].clamp(-1, 1) * torch.finfo(dtype).max
    return x.to(dtype)


def assert_same(ours: Weight, expected: Weight) -> None:
    """Codes, scales and offsets to the bit, the sign of zeros included."""
    assert (ours.scheme, ours.shape, ours.dtype) == (expected.scheme, expected.shape, expected.dtype)
    assert len(ours.parts) == len(expected.parts)
    for own, theirs in zip(ours.parts, expected.parts, strict=True):
        assert own.dtype == theirs.dtype and torch.equal(own.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("scheme", TARGETS, ids=lambda scheme: scheme.name)
def test_codes_and_scales_are_those_of_the_definition(kernels: CpuKernels, scheme: Integers) -> None:
    """For every dtype of numbers and of scales; rows are no multiple of what a thread takes, nor of a vector."""
    columns = 384 if scheme.group else 102
    for dtype in DTYPES:
        weight = dense_weight(numbers(33, columns, dtype))
        for scale_dtype in SCALE_DTYPES:
            assert_same(kernels.quantise(weight, scheme, scale_dtype), quantise(weight, scheme, scale_dtype))


def test_numbers_as_they_lie_in_a_checkpoint(kernels: CpuKernels) -> None:
    """Of another dtype than the product's, in blocks, transposed, within wider rows, in 64 bits, quantised."""
    x, scheme = numbers(40, 96, torch.float16).float(), Integers(4, 32, 0)
    wide = torch.cat((x, x), dim=1)
    for weight in (
        dense_weight(x, torch.bfloat16),
        Weight(DENSE, (x[:7], x[7:].half()), (40, 96), torch.float16),
        dense_weight(x.T.contiguous().T),
        dense_weight(wide[:, 96:]),
        dense_weight(x.double(), torch.float32),
        quantise(dense_weight(x), Integers(8, 16, 128), torch.float32),
    ):
        ours = kernels.quantise(weight, scheme, torch.bfloat16)
        assert_same(ours, quantise(weight, scheme, torch.bfloat16))


def test_large_matrices_on_all_threads(kernels: CpuKernels) -> None:
    x = torch.randn(300, 1056, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            ours = kernels.quantise(dense_weight(x), Integers(8, 32, 128), torch.bfloat16)
            assert_same(ours, quantise(dense_weight(x), Integers(8, 32, 128), torch.bfloat16))
            assert torch.equal(kernels.dense(ours), ours.dense())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scheme", (*SCHEMES, TABLE), ids=lambda scheme: scheme.name[:20])
@pytest.mark.parametrize("offsets", [False, True], ids=["", "offsets"])
def test_plain_numbers_are_those_of_the_definition(
    kernels: CpuKernels, scheme: Integers, offsets: bool
) -> None:
    """For every dtype of numbers and of scales; whole groups or whole rows, and rows that are cut out."""
    for dtype in DTYPES:
        for scale_dtype in SCALE_DTYPES:
            columns = 256 if scheme.group else 102
            weight = random_weight(scheme, 35, columns, dtype, scale_dtype, offsets)
            assert torch.equal(kernels.dense(weight), weight.dense())
            assert torch.equal(kernels.dense(weight.slice(3, 4)), weight.dense()[3:4])
    if scheme.group:
        half = weight.columns(1, 2)
        assert torch.equal(kernels.dense(half), half.dense())


def test_scales_may_be_of_any_size(kernels: CpuKernels) -> None:
    """Infinite ones, too: what is not finite in float32 or in the dtype of the result is not finite in both."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    scales = torch.tensor([[torch.inf], [1e38], [1e-44]])
    for dtype in DTYPES:
        weight = integer_weight(Integers(8, None, 128), codes, scales, None, dtype)
        assert torch.equal(kernels.dense(weight).nan_to_num(7.0), weight.dense().nan_to_num(7.0))


def test_numbers_that_are_not_finite_are_refused(kernels: CpuKernels) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        for dtype in DTYPES:
            x = torch.zeros(100, 64, dtype=dtype)
            x[77, 63] = value
            for scheme in (Integers(8, 32, 128), Integers(4, None, 0)):
                for way in (kernels.quantise, quantise):
                    with pytest.raises(ValueError, match="it holds numbers that are not finite"):
                        way(dense_weight(x), scheme, torch.bfloat16)


def test_the_public_functions_take_the_kernels_or_plain_torch(
    best_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = dense_weight(numbers(20, 128, torch.bfloat16))
    calls: list[str] = []

    class Watched(CpuKernels):
        def quantise(self, weight: Weight, scheme: Integers, scale_dtype: torch.dtype) -> Weight:
            calls.append("quantise")
            return super().quantise(weight, scheme, scale_dtype)

        def dense(self, weight: Weight) -> Tensor:
            calls.append("dense")
            return super().dense(weight)

    for kernels in (Watched(best_kernels.isa, best_kernels._library), None):
        monkeypatch.setattr(cpu_kernels, "load", lambda kernels=kernels: kernels)
        made = linear.quantise(weight, Integers(4, 32, 0))
        assert_same(made, quantise(weight, Integers(4, 32, 0)))
        assert torch.equal(linear.dense(made), made.dense())
        assert torch.equal(linear.dense(weight), weight.parts[0])
    assert calls == ["quantise", "dense"]
    for wrong in (TABLE, Integers(8, 48, 128), Integers(8, 32, 128)):
        with pytest.raises(ValueError, match=r"without a table|no kernel|no multiple of a group"):
            linear.quantise(weight.column_slice(0, 100), wrong)
