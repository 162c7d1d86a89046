"""The block types of GGUF files as weights of integers.

A row of a matrix is a sequence of blocks of 32 or 256 values. The layouts of the blocks are those of ggml
(https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h). Where a block holds one scale and small
factors of it for its groups, the products are rounded to float16, by at most 0.05%; everything else is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.data.integers import Integers, integer_weight
from pagewire.kernels.data.weight import Weight
from pagewire.workers.checkpoint.gguf.grids import points, signs_of_seven
from pagewire.workers.checkpoint.gguf_names import BLOCKS
from pagewire.workers.errors import LoadError

CHUNK_BYTES = 4 << 20  # of blocks, converted at a time: what lies between is some times larger
Parts = tuple[Tensor, Tensor, Tensor | None]
"""Values uint8 [n, K], scales and offsets [n, groups]."""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class BlockType:
    """How blocks become a weight."""

    scheme: Integers
    unpack: Callable[[Tensor], Parts]
    """Blocks uint8 [n, m, bytes] of n rows to their parts; values are codes before two of 4 bits share a byte."""


def quantised(blocks: Tensor, kind: str, dtype: torch.dtype) -> Weight:
    """The weight of a matrix of blocks.

    blocks: uint8 [N, m, bytes of a block], where m blocks are a row. kind: a type in `BLOCK_TYPES`.
    dtype: of the product's inputs and outputs.

    Raises:
        LoadError: the scales are no finite numbers of float16.
    """
    block_type = BLOCK_TYPES[kind]
    rows = max(1, CHUNK_BYTES // max(1, blocks[0].numel()))
    parts: list[Tensor] = []
    for start in range(0, len(blocks), rows):
        chunk = [part for part in block_type.unpack(blocks[start : start + rows]) if part is not None]
        if block_type.scheme.bits == 4:
            chunk[0] = chunk[0][:, 0::2] | chunk[0][:, 1::2] << 4
        if not all(bool(part.isfinite().all()) for part in chunk[1:]):
            raise LoadError(f"a tensor of type {kind} has scales that are no numbers of float16")
        parts = parts or [part.new_empty(len(blocks), part.shape[1]) for part in chunk]
        for part, piece in zip(parts, chunk, strict=True):
            part[start : start + rows] = piece
    codes, scales, *offsets = parts
    return integer_weight(block_type.scheme, codes, scales, offsets[0] if offsets else None, dtype)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 number at a byte of each block, [n, m, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _shifted(codes: Tensor, shifts: tuple[int, ...], width: int) -> Tensor:
    """Runs of `width` bytes of [..., b], each shifted right by each of the shifts: [..., b / width, s, width]."""
    runs = codes.reshape(*codes.shape[:-1], -1, 1, width)
    return runs.bitwise_right_shift(torch.tensor(shifts, dtype=torch.uint8)[:, None])


def _nibbles(codes: Tensor, width: int) -> Tensor:
    """The low halves of `width` bytes, then the high halves, and so on, [..., 2 b]."""
    return (_shifted(codes, (0, 4), width) & 15).flatten(-3)


def _rows(values: Tensor) -> Tensor:
    """Values [n, m, v] of the blocks of n rows as rows [n, m v]."""
    return values.flatten(1)


def _products(scale: Tensor, factors: Tensor) -> Tensor:
    """Scales of float16 [n, m, 1] times small factors [n, m, g] of groups, rounded to float16 [n, m g]."""
    return (scale.float() * factors.float()).to(torch.float16).flatten(1)


def _q8_0(blocks: Tensor) -> Parts:
    return _rows(blocks[..., 2:] ^ 128), _rows(_half(blocks, 0)), None


def _q4_0(blocks: Tensor) -> Parts:
    return _rows(_nibbles(blocks[..., 2:], 16)), _rows(_half(blocks, 0)), None


def _q4_1(blocks: Tensor) -> Parts:
    return _rows(_nibbles(blocks[..., 4:], 16)), _rows(_half(blocks, 0)), _rows(_half(blocks, 2))


def _fifth_bits(high: Tensor) -> Tensor:
    """The bits of 4 bytes [..., 4], lowest first, as 16 or 0: [..., 32]."""
    bits = high[..., None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(-2) << 4


def _q5_0(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    return _rows(codes), _rows(_half(blocks, 0)), None


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return _rows(codes), _rows(_half(blocks, 0)), _rows(_half(blocks, 2))


def _q2_k(blocks: Tensor) -> Parts:
    """16 bytes of scales and minima of 4 bits, 64 bytes of codes, the scale of both."""
    codes = _shifted(blocks[..., 16:80], (0, 2, 4, 6), 32) & 3
    scales = _products(_half(blocks, 80), blocks[..., :16] & 15)
    offsets = _products(-_half(blocks, 82), blocks[..., :16] >> 4)
    return _rows(codes.flatten(-3)), scales, offsets


def _q3_k(blocks: Tensor) -> Parts:
    """32 bytes of highest bits, 64 bytes of codes, 12 bytes of scales of 6 bits, the scale of all."""
    low = (_shifted(blocks[..., 32:96], (0, 2, 4, 6), 32) & 3).flatten(-3)
    high = (_shifted(blocks[..., :32], tuple(range(8)), 32) & 1).flatten(-3)
    packed = blocks[..., 96:108]
    factors = _nibbles(packed[..., :8], 8) | (_shifted(packed[..., 8:], (0, 2, 4, 6), 4) & 3).flatten(-3) << 4
    return _rows(low | high << 2), _products(_half(blocks, 108), factors.to(torch.int8) - 32), None


def _factors_of_6_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits, [..., 8] each, from 12 bytes [..., 12]."""
    scales, minima, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    return (
        torch.cat((scales & 63, (rest & 15) | (scales >> 2 & 48)), dim=-1),
        torch.cat((minima & 63, (rest >> 4) | (minima >> 2 & 48)), dim=-1),
    )


def _q4_k(blocks: Tensor) -> Parts:
    """The scales of scales and minima, 12 bytes of both, 128 bytes of codes."""
    factors, minima = _factors_of_6_bits(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 16:], 32)
    return _rows(codes), _products(_half(blocks, 0), factors), _products(-_half(blocks, 2), minima)


def _q5_k(blocks: Tensor) -> Parts:
    """As Q4_K, with 32 bytes of highest bits before the codes."""
    factors, minima = _factors_of_6_bits(blocks[..., 4:16])
    high = (_shifted(blocks[..., 16:48], tuple(range(8)), 32) & 1).flatten(-3) << 4
    codes = _nibbles(blocks[..., 48:], 32) | high
    return _rows(codes), _products(_half(blocks, 0), factors), _products(-_half(blocks, 2), minima)


def _q6_k(blocks: Tensor) -> Parts:
    """128 bytes of low halves, 64 of high bits, 16 scales of 8 bits with sign, the scale of all."""
    high = (_shifted(blocks[..., 128:192], (0, 2, 4, 6), 32) & 3).flatten(-3) << 4
    factors = blocks[..., 192:208].contiguous().view(torch.int8)
    return _rows(_nibbles(blocks[..., :128], 64) | high), _products(_half(blocks, 208), factors), None


def _iq4_xs(blocks: Tensor) -> Parts:
    """The scale of all, the high bits and the low halves of eight scales, 128 bytes of codes."""
    high = (_shifted(blocks[..., 2:4], (0, 2, 4, 6), 1) & 3).flatten(-3) << 4
    factors = (_nibbles(blocks[..., 4:8], 1) | high).to(torch.int8) - 32
    return _rows(_nibbles(blocks[..., 8:], 16)), _products(_half(blocks, 0), factors), None


def _mxfp4(blocks: Tensor) -> Parts:
    """An exponent, 16 bytes of codes. Values are doubled in the table, so scales are 2**(e - 128)."""
    scales = torch.pow(2.0, blocks[..., :1].to(torch.float64) - 128).to(torch.bfloat16)
    return _rows(_nibbles(blocks[..., 1:], 16)), _rows(scales), None


def _nvfp4(blocks: Tensor) -> Parts:
    """Four scales in 8-bit floats, 32 bytes of codes. Values are doubled in the table."""
    scales = blocks[..., :4].contiguous().view(torch.float8_e4m3fn).float().nan_to_num(0) / 2
    return _rows(_nibbles(blocks[..., 4:], 8)), _rows(scales.to(torch.float16)), None


def _tq1_0(blocks: Tensor) -> Parts:
    """48 bytes of five values of three sizes each, 4 bytes of four, the scale of all."""
    runs = (blocks[..., :32], blocks[..., 32:48], blocks[..., 48:52])
    powers = torch.tensor((1, 3, 9, 27, 81), dtype=torch.uint8)[:, None]
    shifted = [(run[..., None, :] * powers[: 4 if run.shape[-1] == 4 else 5]).flatten(-2) for run in runs]
    codes = torch.cat(shifted, dim=-1).int() * 3 >> 8
    return _rows(codes.to(torch.uint8)), _rows(_half(blocks, 52).repeat_interleave(2, -1)), None


def _tq2_0(blocks: Tensor) -> Parts:
    """64 bytes of codes, the scale of all."""
    codes = _shifted(blocks[..., :64], (0, 2, 4, 6), 32) & 3
    return _rows(codes.flatten(-3)), _rows(_half(blocks, 64).repeat_interleave(2, -1)), None


def _words(blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Bytes of each block as unsigned words of the size of int16 or int32, int64 [n, m, words]."""
    words = blocks[..., start:stop].contiguous().view(dtype).long()
    return words & (1 << 8 * dtype.itemsize) - 1


def _signed(kind: str, numbers: Tensor, signs: Tensor) -> Tensor:
    """The codes of points by number [n, m, p], with their signs as bits [n, m, 32]: the fourth bit of a code."""
    sizes = points(kind)[numbers.long()].flatten(-2)
    bits = signs.to(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _rows(sizes | bits.flatten(-2) << 3)


def _with_scales(kind: str, numbers: Tensor, words: Tensor, scale: Tensor, unit: float) -> Parts:
    """Points of a type whose groups of 32 have a word each: four times the signs of eight values, and a scale.

    words: int64 [n, m, 8]. unit: of the scales' odd numbers.
    """
    signs = signs_of_seven(words[..., None] >> torch.arange(0, 28, 7) & 127).flatten(-2)
    return _signed(kind, numbers, signs), _products(scale, (2 * (words >> 28) + 1) * unit), None


def _iq2_xxs(blocks: Tensor) -> Parts:
    """The scale of all; for each group 4 bytes of points, and a word of signs and a scale."""
    numbers = torch.unflatten(blocks[..., 2:66], -1, (8, 8))[..., :4].flatten(-2)
    return _with_scales(
        "IQ2_XXS", numbers, _words(blocks, 2, 66, torch.int32)[..., 1::2], _half(blocks, 0), 1 / 8
    )


def _iq3_xxs(blocks: Tensor) -> Parts:
    """The scale of all, 64 bytes of points, a word of signs and a scale for each group."""
    return _with_scales(
        "IQ3_XXS", blocks[..., 2:66], _words(blocks, 66, 98, torch.int32), _half(blocks, 0), 1 / 4
    )


def _iq2_xs(blocks: Tensor) -> Parts:
    """The scale of all, 32 words of a point and seven signs, 16 scales of 4 bits."""
    words = _words(blocks, 2, 66, torch.int16)
    factors = (2 * _nibbles(blocks[..., 66:74], 1) + 1) / 8
    return (
        _signed("IQ2_XS", words & 511, signs_of_seven(words >> 9)),
        _products(_half(blocks, 0), factors),
        None,
    )


def _iq2_s(blocks: Tensor) -> Parts:
    """The scale of all, low bytes of 32 points, their signs, their high bits, 16 scales of 4 bits."""
    high = (_shifted(blocks[..., 66:74], (0, 2, 4, 6), 1) & 3).flatten(-3)
    numbers = blocks[..., 2:34].long() | high.long() << 8
    factors = (2 * _nibbles(blocks[..., 74:82], 1) + 1) / 8
    return _signed("IQ2_S", numbers, blocks[..., 34:66]), _products(_half(blocks, 0), factors), None


def _iq3_s(blocks: Tensor) -> Parts:
    """The scale of all, low bytes of 64 points, their high bits, signs, 8 scales of 4 bits."""
    high = (_shifted(blocks[..., 66:74], tuple(range(8)), 1) & 1).flatten(-3)
    numbers = blocks[..., 2:66].long() | high.long() << 8
    factors = 2 * _nibbles(blocks[..., 106:110], 1) + 1
    return _signed("IQ3_S", numbers, blocks[..., 74:106]), _products(_half(blocks, 0), factors), None


def _iq1(blocks: Tensor, high: Tensor, below: Tensor) -> Tensor:
    """The codes of points whose low bytes a block begins with. high: the rest of their numbers; below: 0, or 1 for
    values that are an eighth less, not more, than theirs."""
    sizes = points("IQ1_S")[blocks.long() | high << 8]
    return _rows((sizes | (below << 3).to(torch.uint8)[..., None]).flatten(-2))


def _iq1_s(blocks: Tensor) -> Parts:
    """The scale of all, low bytes of 32 points, 8 words of their high bits, a scale and a side."""
    words = _words(blocks, 34, 50, torch.int16)
    high = (words[..., None] >> torch.arange(0, 12, 3) & 7).flatten(-2)
    codes = _iq1(blocks[..., 2:34], high, (words >> 15).repeat_interleave(4, -1))
    return codes, _products(_half(blocks, 0), (2 * (words >> 12 & 7) + 1) / 8), None


def _iq1_m(blocks: Tensor) -> Parts:
    """Low bytes of 32 points, their high bits and sides, four words of four scales and a part of that of all."""
    halves = _nibbles(blocks[..., 32:48], 1).long()
    words = _words(blocks, 48, 56, torch.int16)
    scale = (words >> 12 << torch.arange(0, 16, 4)).sum(-1, keepdim=True)
    factors = (words[..., None] >> torch.arange(0, 12, 3) & 7).flatten(-2)
    codes = _iq1(blocks[..., :32], halves & 7, halves >> 3)
    return codes, _products(scale.to(torch.int16).view(torch.float16), (2 * factors + 1) / 8), None


def _both_signs(*sizes: int) -> tuple[int, ...]:
    """A table around 128 of eight sizes and the same below it; what no code has is 128."""
    spare = (128,) * (8 - len(sizes))
    return tuple(128 + size for size in sizes) + spare + tuple(128 - size for size in sizes) + spare


TABLES = {
    **dict.fromkeys(("IQ1_S", "IQ1_M"), (121, 129, 137, *(128,) * 5, 119, 127, 135, *(128,) * 5)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), _both_signs(8, 25, 43)),
    "IQ3_XXS": _both_signs(4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": _both_signs(1, 3, 5, 7, 9, 11, 13, 15),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), tuple(value + 128 for value in IQ4_VALUES)),
    **dict.fromkeys(("MXFP4", "NVFP4"), tuple(value + 12 for value in MXFP4_VALUES)),
}
UNPACK = (
    {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1}
    | {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
    | {"IQ4_NL": _q4_0, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, "NVFP4": _nvfp4, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0}
    | {"IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s}
    | {"IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s}
)
BLOCK_TYPES = {
    name: BlockType(Integers(*scheme, TABLES.get(name)), UNPACK[name]) for name, scheme in BLOCKS.items()
}
"""The quantised types that are read; `reader.FLOATS` has the others."""
