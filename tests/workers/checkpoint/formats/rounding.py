"""Matrices rounded to integers with scales, and packed bit by bit as quantisers' files hold them.

The oracle of the readers: it shares no code with them, and follows the layouts one bit or one code at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Rounded:
    """A matrix as integers: `scales[n, g(k)] * (codes[n, k] - zeros[n, g(k)])`."""

    bits: int
    codes: Tensor
    """uint8 [N, K]."""
    scales: Tensor
    """[N, G]."""
    zeros: Tensor
    """int64 [N, G]."""
    index: Tensor
    """g(k), int64 [K]."""

    def dense(self) -> Tensor:
        """The matrix in float64, which holds each product exactly."""
        steps = self.codes.double() - self.zeros.double()[:, self.index]
        return steps * self.scales.double()[:, self.index]


def rounded(
    weight: Tensor,
    bits: int,
    group: int = -1,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    index: Tensor | None = None,
) -> Rounded:
    """A matrix [N, K] rounded to the nearest integers.

    group: columns with a scale; -1: all. dtype: of the scales. index: the groups of the columns, if they are not
    adjacent.
    """
    num_in = weight.shape[1]
    index = torch.arange(num_in) // (num_in if group == -1 else group) if index is None else index
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    by_group = [weight[:, index == group].float() for group in range(int(index.max()) + 1)]
    low = torch.stack([columns.amin(1).clamp(max=0) for columns in by_group], 1)
    high = torch.stack([columns.amax(1).clamp(min=0) for columns in by_group], 1)
    steps = max(1, most - middle) if symmetric else most
    reach = torch.maximum(-low, high) if symmetric else high - low
    scales = (reach / steps).clamp(min=1e-4).to(dtype)
    zeros = torch.full(scales.shape, middle)
    if not symmetric:
        zeros = (-low / scales.float()).round().clamp(0, most).long()
    codes = (weight.float() / scales.float()[:, index]).round() + zeros[:, index]
    return Rounded(bits, codes.clamp(0, most).to(torch.uint8), scales, zeros, index)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Rows of integers [R, C] as streams of bits, the lowest first, in int32 words; the last may have room."""
    values = codes.numpy().astype(np.uint8)
    stream = np.zeros((values.shape[0], -(-values.shape[1] * bits // 32) * 32), dtype=np.uint8)
    for bit in range(bits):
        stream[:, bit : values.shape[1] * bits : bits] = values >> bit & 1
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32))


def awq_gemm(matrix: Rounded) -> dict[str, Tensor]:
    """The tensors of AWQ's layout gemm."""

    def interleaved(rows: Tensor) -> Tensor:
        eights = rows.reshape(len(rows), -1, 8)
        return packed(torch.stack([eights[..., out] for out in (0, 2, 4, 6, 1, 3, 5, 7)], -1).flatten(1), 4)

    return {
        "qweight": interleaved(matrix.codes.T),
        "qzeros": interleaved(matrix.zeros.T),
        "scales": matrix.scales.T.contiguous(),
    }


def awq_gemv(matrix: Rounded) -> dict[str, Tensor]:
    """The tensors of AWQ's layout gemv; rows of zeros end with unused ones."""
    spare = -matrix.zeros.shape[1] % 8 + 8
    return {
        "qweight": packed(matrix.codes, 4),
        "qzeros": packed(torch.nn.functional.pad(matrix.zeros, (0, spare)), 4),
        "scales": torch.nn.functional.pad(matrix.scales, (0, spare)),
    }


def gptq(matrix: Rounded, version: int = 1) -> dict[str, Tensor]:
    """The tensors of GPTQ. version: in the first, zeros are stored less one."""
    bits = matrix.bits
    zeros = packed(matrix.zeros.T, bits)
    if version == 1 and bits == 3:
        zeros = packed((matrix.zeros.T - 1) % 8, bits)
    elif version == 1:
        ones = packed(torch.ones_like(matrix.zeros.T), bits)
        zeros = (zeros.long() - ones.long()).to(torch.int32)
    return {
        "qweight": packed(matrix.codes, bits).T.contiguous(),
        "qzeros": zeros,
        "scales": matrix.scales.T.contiguous(),
        "g_idx": matrix.index.int(),
    }


def marlin(matrix: Rounded) -> tuple[Tensor, Tensor]:
    """The words and scales of the layout marlin, by what each lane of a tensor core's instruction holds."""
    codes, scales = matrix.codes.T, matrix.scales.T
    num_in, num_out = codes.shape
    words = torch.zeros(num_in // 16, num_out // 64, 32, 4, dtype=torch.int64)
    for lane in range(32):
        column, first = lane // 4, 2 * (lane % 4)
        for tile in range(4):
            needed = [(first + row, column + half) for half in (0, 8) for row in (0, 1, 8, 9)]
            for place, which in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                row, out = needed[which]
                words[:, :, lane, tile] |= codes[row::16, 16 * tile + out :: 64].long() << 4 * place
    ordered = torch.empty_like(scales)
    if len(scales) > 1:
        for place in range(64):
            ordered[:, place::64] = scales[:, place // 8 + 8 * (place % 8) :: 64]
    else:
        for place in range(32):
            source = 2 * (place // 8) + (0, 1, 8, 9, 16, 17, 24, 25)[place % 8]
            ordered[:, place::32] = scales[:, source::32]
    return words.reshape(num_in // 16, -1).to(torch.int32), ordered


def compressed(matrix: Rounded, symmetric: bool = True) -> dict[str, Tensor]:
    """The tensors of compressed-tensors' format pack-quantized."""
    tensors = {
        "weight_packed": packed(matrix.codes, matrix.bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(matrix.zeros.T, matrix.bits).T.contiguous()
    return tensors


def signed(matrix: Rounded, symmetric: bool = True) -> dict[str, Tensor]:
    """The tensors of compressed-tensors' format int-quantized."""
    middle = 2 ** (matrix.bits - 1)
    tensors = {"weight": (matrix.codes.short() - middle).to(torch.int8), "weight_scale": matrix.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (matrix.zeros - middle).to(torch.int8)
    return tensors
