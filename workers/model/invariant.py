"""Arithmetic whose bits do not depend on the batch: a row's result is the same alone and among a thousand.

PyTorch does not promise this. A product of one row sums in another order than one of many, and an elementwise
function computes what is left over behind the last full vector by other code than the rest. Here products go
through the kernels, and what is elementwise is padded to full vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from pagewire.kernels.linear import linear

VECTOR = 64  # elements of two of the widest vectors, which PyTorch's loops take at a time
GRAIN = 32768  # elements from which on PyTorch gives an elementwise loop to another thread


def padded_size(size: int, num_threads: int) -> int:
    """The least size from `size` on that splits into equal parts of full vectors, one for each thread at work."""
    while True:
        num_parts = min(num_threads, max(1, -(-size // GRAIN)))
        if size % (VECTOR * num_parts) == 0:
            return size
        size += -size % (VECTOR * num_parts)


def elementwise(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`function(x, ...)` of the same shape, invariant."""
    size = x.numel()
    padded = padded_size(size, torch.get_num_threads())
    if padded == size and x.is_contiguous():
        return function(x, *args, **kwargs)
    flat = x.new_zeros(padded)
    flat[:size].view(x.shape).copy_(x)
    return function(flat, *args, **kwargs)[:size].view(x.shape)


NAMES = ("exp", "expm1", "log", "log1p", "sigmoid", "tanh", "erf", "sin", "cos")
ELEMENTWISE = {
    *(getattr(torch, name) for name in NAMES),
    *(getattr(Tensor, name) for name in NAMES),
    *(F.silu, F.gelu, F.sigmoid, F.tanh, F.softplus, F.mish, F.elu, F.logsigmoid),
}


class Invariant(TorchFunctionMode):
    """Makes products and elementwise functions invariant in code that knows nothing of it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for each of PyTorch's functions; within, the mode is off."""
        kwargs = kwargs or {}
        if func is F.linear:
            return linear(*args, **kwargs)
        if func in ELEMENTWISE and args and not (kwargs.get("inplace") or "out" in kwargs):
            return elementwise(func, *args, **kwargs)
        return func(*args, **kwargs)
