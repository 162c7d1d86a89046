"""Arithmetic whose bits do not depend on the batch: a row's result is the same alone and among a thousand.

PyTorch does not promise this. A product of one row sums in another order than one of many, and an elementwise
function computes what is left over behind the last full vector by other code than the rest. Here single rows are
doubled, and what is elementwise is padded to full vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

PACKED_DTYPES = (torch.float32, torch.bfloat16)
VECTOR = 64  # elements of two of the widest vectors, which PyTorch's loops take at a time
GRAIN = 32768  # elements from which on PyTorch gives an elementwise loop to another thread


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: `F.linear`, but invariant.

    The weight may be packed. For dtypes that oneDNN does not take, PyTorch's own product is used.
    """
    num_rows = x.numel() // x.shape[-1]
    rows = x.reshape(num_rows, x.shape[-1])
    if num_rows == 1:
        rows = rows.expand(2, -1).contiguous()
    if rows.dtype in PACKED_DTYPES and num_rows:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        out = F.linear(rows, weight, bias)
    out = out if out.shape[0] == num_rows else out[:num_rows]
    return out.view(*x.shape[:-1], out.shape[-1])


def pack(weight: Tensor) -> Tensor:
    """A weight [N, K] in the layout in which oneDNN multiplies fastest, where it has one."""
    if weight.dtype in PACKED_DTYPES:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)  # type: ignore[no-any-return]
    return weight


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
            return product(*args, **kwargs)
        if func in ELEMENTWISE and args and not (kwargs.get("inplace") or "out" in kwargs):
            return elementwise(func, *args, **kwargs)
        return func(*args, **kwargs)
