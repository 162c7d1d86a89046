"""PyTorch's elementwise functions, batch-invariant: the bits of an element depend on nothing but its value.

On a CPU PyTorch computes the elements after the last full vector, and those where two threads meet, by other code
than the rest. Here inputs are padded, so that every thread has full vectors only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VECTOR = 64  # elements per iteration of PyTorch's vectorized loops: two of the widest vectors
GRAIN = 32768  # elements per thread of PyTorch's elementwise loops


def padded_size(size: int, num_threads: int) -> int:
    """The least number from `size` on that all working threads can share in equal parts of full vectors."""
    while True:
        num_parts = min(num_threads, max(1, -(-size // GRAIN)))
        if size % (VECTOR * num_parts) == 0:
            return size
        size += -size % (VECTOR * num_parts)


def elementwise(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`function(x, ...)`, batch-invariant; the result has the shape of x."""
    if x.device.type != "cpu":
        return function(x, *args, **kwargs)
    size = x.numel()
    padded = padded_size(size, torch.get_num_threads())
    if padded == size and x.is_contiguous():
        return function(x, *args, **kwargs)
    flat = x.new_zeros(padded)
    flat[:size].view(x.shape).copy_(x)
    return function(flat, *args, **kwargs)[:size].view(x.shape)
