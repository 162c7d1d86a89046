"""The sizes of packed weights, told without packing, are those of the C++ code."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.packed_size import IntegerForm, packed_bytes, packed_integer_bytes
from pagewire.kernels.cpu.quantised import QuantisedLinear
from pagewire.kernels.integers import Integers, quantise
from pagewire.kernels.weight import dense_weight

SHAPES = [(1, 1), (64, 64), (100, 65), (200, 33), (128, 1000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_floats(kernels: CpuKernels, dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        packed = kernels.pack(dense_weight(torch.ones(rows, columns, dtype=dtype))).packed
        name = str(dtype).removeprefix("torch.")
        assert packed_bytes(rows, columns, name, kernels.isa.name) == packed.nbytes


@pytest.mark.parametrize(
    "scheme", [Integers(8, None, 128), Integers(8, 32, 128), Integers(4, 32, 8)], ids=str
)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=str)
def test_integers(kernels: CpuKernels, scheme: Integers, scale_dtype: torch.dtype) -> None:
    for rows, columns in [(1, 32), (33, 64), (64, 96), (100, 1024)]:
        weight = quantise(dense_weight(torch.ones(rows, columns)), scheme, scale_dtype)
        packed = kernels.pack(weight)
        assert isinstance(packed, QuantisedLinear)
        form = IntegerForm(scheme.bits, scheme.group, has_offsets=False, scale_bytes=scale_dtype.itemsize)
        assert packed_integer_bytes(rows, columns, form, kernels.isa.name) == packed.packed.nbytes


def test_offsets_take_as_much_as_scales() -> None:
    assert packed_integer_bytes(64, 256, IntegerForm(4, 32, True, 4), "amx") == 64 * (128 + 8 * 8)
    assert packed_integer_bytes(1, 65, IntegerForm(8, None, False), "avx2") == 16 * (128 + 2)
