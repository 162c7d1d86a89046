"""Batch-invariant arithmetic: the result of a row is the same, to the bit, alone and in any batch.

PyTorch does not guarantee this. A matrix product sums in another order for one row than for many, and an
elementwise function computes the elements after the last full vector by other code than the rest. Here products
use our kernels, and the inputs of elementwise functions are padded to full vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from pagewire.kernels.linear import linear

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
    """A context in which PyTorch's products and elementwise functions are batch-invariant."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by PyTorch in place of each of its functions; the mode is off within."""
        kwargs = kwargs or {}
        if func is F.linear:
            return linear(*args, **kwargs)
        if func in ELEMENTWISE and args and not (kwargs.get("inplace") or "out" in kwargs):
            return elementwise(func, *args, **kwargs)
        return func(*args, **kwargs)
