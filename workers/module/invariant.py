"""Batch-invariant arithmetic: the result of a row is the same, to the bit, alone and in any batch.

PyTorch does not guarantee this: a matrix product sums in another order for one row than for many. Here products use
our kernels, and elementwise functions `kernels/data/elementwise.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from pagewire.kernels.data.elementwise import elementwise
from pagewire.kernels.ops import linear
from pagewire.workers.errors import LoadError

OTHER_PRODUCT = "it multiplies by the weight of a linear layer itself, where it should call the layer"
NAMES = ("exp", "expm1", "log", "log1p", "sigmoid", "tanh", "erf", "sin", "cos")
ELEMENTWISE = {
    *(getattr(torch, name) for name in NAMES),
    *(getattr(Tensor, name) for name in NAMES),
    F.silu,
    F.gelu,
    F.sigmoid,
    F.tanh,
    F.softplus,
    F.mish,
    F.elu,
    F.logsigmoid,
}


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with its names of arguments.

    Raises:
        LoadError: the weight is that of a packed layer, which has no numbers of its own (`LinearModule`).
    """
    if weight.is_meta:
        raise LoadError(OTHER_PRODUCT)
    return linear(input, weight, bias)


class Invariant(TorchFunctionMode):
    """A context in which PyTorch's products and elementwise functions are batch-invariant."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by PyTorch in place of each of its functions; the mode is off within."""
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in ELEMENTWISE and args and not (kwargs.get("inplace") or "out" in kwargs):
            return elementwise(func, *args, **kwargs)
        return func(*args, **kwargs)
