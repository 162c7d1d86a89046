"""Linear layers behind the pooling, each with a function behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.data.elementwise import elementwise
from pagewire.kernels.linear import Linear

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Tanh": torch.tanh,
    "GELU": torch.nn.functional.gelu,
    "ReLU": torch.relu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Dense:
    """A linear layer behind the pooling, and the function of `FUNCTIONS` behind it."""

    product: Linear
    activation: str | None

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [n, K] to float32 [n, N]."""
        y = self.product(x.to(self.product.dtype)).float()
        return y if self.activation is None else elementwise(FUNCTIONS[self.activation], y)


def chain(layers: Sequence[Dense], x: Tensor) -> Tensor:
    """Rows [n, K] through layer after layer to float32 [n, N]; their bits do not depend on each other."""
    for layer in layers:
        x = layer(x)
    return x
