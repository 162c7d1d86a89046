"""The sizes of packed weights, told without packing, are what the C++ code writes: no byte less, none beyond."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu.build import panels_of
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.linear import PackedLinear
from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.kernels.cpu.quantised import QuantisedLinear
from pagewire.kernels.data.integers import Integers, quantise
from pagewire.kernels.data.weight import dense_weight

SHAPES = [(1, 1), (64, 64), (100, 65), (200, 33), (128, 1000)]


def num_written(pack: Callable[[Tensor], None], most: int) -> int:
    """Bytes that are written to memory of `most` bytes, from its beginning and without a gap."""
    zeros, ones = torch.zeros(most, dtype=torch.uint8), torch.full((most,), 255, dtype=torch.uint8)
    for memory in (zeros, ones):
        pack(memory)
    written = zeros == ones
    size = int(written.sum())
    assert written[:size].all()
    return size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_floats(kernels: CpuKernels, dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        weight = torch.ones(rows, columns, dtype=dtype)
        linear = kernels.pack(dense_weight(weight))
        assert isinstance(linear, PackedLinear)
        size = (
            kernels.isa.panels.float_size(rows, columns, str(dtype).removeprefix("torch.")) * dtype.itemsize
        )
        assert linear.packed.nbytes == size
        assert num_written(lambda to: linear._pack(weight, to), size + 1024) == size  # noqa: B023


@pytest.mark.parametrize(
    "scheme", [Integers(8, None, 128), Integers(8, 32, 128), Integers(4, 32, 8)], ids=str
)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=str)
def test_integers(kernels: CpuKernels, scheme: Integers, scale_dtype: torch.dtype) -> None:
    for rows, columns in [(1, 32), (33, 64), (64, 96), (100, 1024)]:
        weight = quantise(dense_weight(torch.ones(rows, columns)), scheme, scale_dtype)
        packed = kernels.pack(weight)
        assert isinstance(packed, QuantisedLinear)
        stored = NumberFormat(scheme.bits, scheme.group, has_offsets=False, scale_bytes=scale_dtype.itemsize)
        size = kernels.isa.panels.integer_bytes(rows, columns, stored)
        assert size == packed.packed.nbytes
        assert num_written(lambda to: packed._pack(weight, to), size + 1024) == size  # noqa: B023


def test_offsets_take_as_much_as_scales() -> None:
    assert panels_of("amx").integer_bytes(64, 256, NumberFormat(4, 32, True, 4)) == 64 * (128 + 8 * 8)
    assert panels_of("avx2").integer_bytes(1, 65, NumberFormat(8, None, False)) == 16 * (128 + 2)
