"""Keys and values of 8 bits: signed codes with one scale for each token and head.

A row of a cache of `torch.int8` is the codes of a head of `size` elements and the `SCALE_BYTES` of its scale, so a
block is one piece of memory as with any other dtype. An element is `code * scale`; the scale is the row's largest
magnitude over 127. `cpu/codes.h` is the same in C++, to the bit, but compiled kernels keep a block's scales behind
its codes.
"""

import torch
from torch import Tensor

DTYPE = torch.int8
SCALE_BYTES = 4
LARGEST_CODE = 127
SMALLEST = 1e-30
"""Rows whose largest magnitude is below become zeros."""


def row_width(size: int, dtype: torch.dtype) -> int:
    """Elements of a cache's row that holds a head of `size` elements."""
    return size + SCALE_BYTES if dtype == DTYPE else size


def head_size(cache: Tensor) -> int:
    """Elements of the heads that a cache [num_blocks, heads, block_size, row width] holds."""
    return cache.shape[3] - SCALE_BYTES if cache.dtype == DTYPE else cache.shape[3]


def quantise(x: Tensor) -> Tensor:
    """Rows [..., size] of floats as rows of a cache: int8 [..., size + SCALE_BYTES].

    A row with an element that is not finite gets NaN as its scale, so that whatever is computed from it is NaN.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest / LARGEST_CODE
    factor = torch.where(largest < SMALLEST, 0.0, 1 / scale)
    scale = torch.where(largest < SMALLEST, 0.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    codes = (x * factor).nan_to_num(0.0, 0.0, 0.0).round().to(DTYPE)
    return torch.cat((codes, scale.view(DTYPE)), -1)


def dequantise(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a cache, int8 [..., size + SCALE_BYTES], as floats [..., size] of `dtype`."""
    codes, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    # A single row is contiguous, but its scale may lie at any byte, and a view needs a multiple of four: copy.
    scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return codes.to(dtype) * scale.to(dtype)
