"""The sizes of packed weights, told without packing, are those of the C++ code."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.packed_size import IntegerForm, packed_bytes, packed_integer_bytes
from pagewire.kernels.weight import dense_weight

SHAPES = [(1, 1), (64, 64), (100, 65), (200, 33), (128, 1000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_floats(kernels: CpuKernels, dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        packed = kernels.pack(dense_weight(torch.ones(rows, columns, dtype=dtype))).packed
        name = str(dtype).removeprefix("torch.")
        assert packed_bytes(rows, columns, name, kernels.isa.name) == packed.nbytes


def test_integers_take_their_bits_scales_and_offsets() -> None:
    assert packed_integer_bytes(64, 256, IntegerForm(8, None, False), "avx512") == 64 * (256 + 2)
    assert packed_integer_bytes(64, 256, IntegerForm(4, 32, False), "avx512") == 64 * (128 + 8 * 2)
    assert packed_integer_bytes(64, 256, IntegerForm(4, 32, True, 4), "amx") == 64 * (128 + 8 * 8)
    assert packed_integer_bytes(1, 65, IntegerForm(8, None, False), "avx2") == 16 * (128 + 2)
