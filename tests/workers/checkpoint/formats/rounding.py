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


def hqq(matrix: Rounded) -> dict[str, Tensor]:
    """The tensors of HQQ with groups along rows: runs of groups in the bits of words, the first in the highest."""
    rows, columns = matrix.codes.shape
    per_word = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}[matrix.bits]
    groups = matrix.codes.reshape(-1, columns // matrix.scales.shape[1]).long()
    run = -(-len(groups) // per_word)
    words = torch.zeros(run, groups.shape[1], dtype=torch.int64)
    for row, codes in enumerate(groups):
        words[row % run] |= codes << matrix.bits * (per_word - 1 - row // run)
    settings = {"nbits": matrix.bits, "group_size": groups.shape[1], "axis": 1, "view_as_float": 0}
    return {
        "W_q": words.to(torch.int32 if matrix.bits == 3 else torch.uint8),
        "scale": matrix.scales.reshape(-1, 1),
        "zero": matrix.zeros.to(matrix.scales.dtype).reshape(-1, 1),
        "shape": torch.tensor([rows, columns]),
        "packing": torch.tensor(list(b"a name"), dtype=torch.uint8),
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in settings.items()},
    }


def torchao_int4(matrix: Rounded) -> dict[str, Tensor]:
    """The parts of torchao's Int4Tensor; the numbers that it adds are multiples of its scales here."""
    signed = matrix.codes.long() - 8
    return {
        "._weight_qdata": (signed[:, 0::2] % 16 | signed[:, 1::2] % 16 << 4).to(torch.uint8).view(torch.int8),
        "._weight_scale": matrix.scales.T.float(),
        "._weight_zero_point": ((8 - matrix.zeros) * matrix.scales.float()).T,
    }


def torchao_int8(matrix: Rounded) -> dict[str, Tensor]:
    """The parts of torchao's Int8Tensor and IntxUnpackedToInt8Tensor."""
    middle = 2 ** (matrix.bits - 1)
    return {
        "._weight_qdata": (matrix.codes.short() - middle).to(torch.int8),
        "._weight_scale": matrix.scales,
        "._weight_zero_point": (matrix.zeros - middle).to(torch.int8),
    }


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of 4-bit floats without a sign, by code; the fourth bit is the sign."""


@dataclass
class RoundedFloats:
    """A matrix of 4-bit floats with scales of groups, and a factor of all scales."""

    codes: Tensor
    """int64 [N, K]."""
    scales: Tensor
    """[N, G]: float8 for groups of 16 (NVFP4), exponents in uint8 for groups of 32 (MXFP4)."""
    factor: Tensor
    """float32, 1 for MXFP4."""

    def packed(self) -> Tensor:
        """The codes, two in a byte."""
        return (self.codes[:, 0::2] + 16 * self.codes[:, 1::2]).to(torch.uint8)

    def dense(self) -> Tensor:
        """The matrix in float32, one number after the other rounded as the definition says."""
        sizes = torch.tensor([*E2M1, *(-size for size in E2M1)])[self.codes]
        is_power = self.scales.dtype == torch.uint8
        scales = torch.exp2(self.scales.float() - 127) if is_power else self.scales.float() * self.factor
        return sizes * scales.repeat_interleave(self.codes.shape[1] // scales.shape[1], 1)


def rounded_floats(weight: Tensor, group: int) -> RoundedFloats:
    """A matrix [N, K] rounded to the nearest NVFP4 (groups of 16) or MXFP4 (groups of 32)."""
    groups = weight.float().unflatten(1, (-1, group))
    reach, factor = groups.abs().amax(-1) / 6, torch.ones(())
    if group == 16:
        factor = reach.max() / 448
        scales = (reach / factor).to(torch.float8_e4m3fn)
        steps = groups / (scales.float() * factor)[..., None]
    else:
        scales = (reach.log2().ceil() + 127).to(torch.uint8)
        steps = groups / torch.exp2(scales.float() - 127)[..., None]
    sizes = torch.tensor(E2M1)
    codes = (steps.abs().flatten(1)[..., None] - sizes).abs().argmin(-1)
    return RoundedFloats(codes + 8 * (steps.flatten(1) < 0), scales, factor)
