"""Keys and values as codes of 8 or 4 bits, with their scales beside them.

A row of a cache of codes is those of a head of `size` elements, and behind them what makes numbers of them, so a
block is one piece of memory as with any other dtype.

- `EIGHT_BITS`, a cache of `torch.int8`: signed codes, and one float32 for each row. An element is `code * scale`;
  the scale is the row's largest magnitude over 127.
- `FOUR_BITS`, a cache of `torch.uint8`: codes from 0 to 15, two in a byte, and for each `GROUP` elements (or the
  last, fewer ones) a scale and the least element, in bfloat16, which has the range of every model's numbers. An
  element is `code * scale + least`; the scale is the distance of the largest element from the least one, over 15.

`cpu/codes.h` and `cpu/nibbles.h` are the same in C++, to the bit. The order within a block is their own.
"""

import torch
from torch import Tensor

EIGHT_BITS, FOUR_BITS = torch.int8, torch.uint8
CODES = (EIGHT_BITS, FOUR_BITS)
"""The dtypes of caches of codes."""
SCALE_BYTES = 4
"""Of a row of 8 bits."""
LARGEST_CODE = 127
GROUP = 32
"""Elements that share a scale in 4 bits."""
RANGE_BYTES = 4
"""Of a group: its scale and its least element."""
LARGEST_NIBBLE = 15
SMALLEST = 1e-30
"""A row whose largest magnitude is below becomes zeros, and a group whose scale is below its least element."""


def row_width(size: int, dtype: torch.dtype) -> int:
    """Elements of a cache's row that holds a head of `size` elements.

    Raises:
        ValueError: the head has an odd size, and two codes of it would lie in a byte.
    """
    if dtype == EIGHT_BITS:
        return size + SCALE_BYTES
    if dtype != FOUR_BITS:
        return size
    if size % 2:
        raise ValueError(f"a cache of 4 bits needs heads of an even size, not {size}")
    return size // 2 + -(-size // GROUP) * RANGE_BYTES


def head_size(cache: Tensor) -> int:
    """Elements of the heads that a cache [num_blocks, heads, block_size, row width] holds."""
    width = cache.shape[3]
    if cache.dtype == EIGHT_BITS:
        return width - SCALE_BYTES
    if cache.dtype != FOUR_BITS:
        return width
    groups, rest = divmod(width, GROUP // 2 + RANGE_BYTES)
    return groups * GROUP + (2 * (rest - RANGE_BYTES) if rest else 0)


def quantise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., size] of floats as rows of a cache of codes: `dtype` [..., `row_width`].

    A row (in 4 bits: a group) with an element that is not finite gets NaN as its scale, so that whatever is
    computed from it is NaN.
    """
    return (_bytes if dtype == EIGHT_BITS else _nibbles)(x.float())


def dequantise(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a cache of codes as floats [..., size] of `dtype`."""
    return (_of_bytes if rows.dtype == EIGHT_BITS else _of_nibbles)(rows, dtype)


def _bytes(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest / LARGEST_CODE
    factor = torch.where(largest < SMALLEST, 0.0, 1 / scale)
    scale = torch.where(largest < SMALLEST, 0.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    codes = (x * factor).nan_to_num(0.0, 0.0, 0.0).round().to(EIGHT_BITS)
    return torch.cat((codes, scale.view(EIGHT_BITS)), -1)


def _of_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    # A single row is contiguous, but its scale may lie at any byte, and a view needs a multiple of four: copy.
    scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return codes.to(dtype) * scale.to(dtype)


def _nibbles(x: Tensor) -> Tensor:
    groups = [_group(x[..., first : first + GROUP]) for first in range(0, x.shape[-1], GROUP)]
    codes = torch.cat([codes for codes, _ in groups], -1)
    return torch.cat((codes[..., ::2] | codes[..., 1::2] << 4, *(ranges for _, ranges in groups)), -1)


def _group(x: Tensor) -> tuple[Tensor, Tensor]:
    """The codes uint8 [..., n] of a group [..., n], and the bytes of its scale and its least element."""
    least = x.amin(-1, keepdim=True).bfloat16()
    scale = ((x.amax(-1, keepdim=True) - least.float()) / LARGEST_NIBBLE).bfloat16().float()
    is_flat = scale < SMALLEST  # so is what lies below its least element, which is rounded
    factor, scale = torch.where(is_flat, 0.0, 1 / scale), torch.where(is_flat, 0.0, scale)
    scale = torch.where(x.isfinite().all(-1, keepdim=True), scale, torch.nan)
    codes = ((x - least.float()) * factor).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, LARGEST_NIBBLE)
    return codes.to(FOUR_BITS), torch.cat((scale.bfloat16(), least), -1).view(FOUR_BITS)


def _of_nibbles(rows: Tensor, dtype: torch.dtype) -> Tensor:
    num_groups = -(-rows.shape[-1] // (GROUP // 2 + RANGE_BYTES))
    end = rows.shape[-1] - num_groups * RANGE_BYTES
    packed, ranges = rows[..., :end], rows[..., end:]
    codes = torch.stack((packed & LARGEST_NIBBLE, packed >> 4), -1).flatten(-2).float()
    # Copied, since a view of two bytes as one number must begin at an even one.
    numbers = ranges.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
    scales, least = (
        numbers[..., i::2].repeat_interleave(GROUP, -1)[..., : codes.shape[-1]] for i in range(2)
    )
    return (codes * scales + least).to(dtype)
