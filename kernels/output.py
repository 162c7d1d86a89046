"""An output layer whose logits are scaled or capped (Granite, Cohere, Gemma 2)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagewire.kernels.data.weight import Linear
from pagewire.kernels.dispatch import as_they_are
from pagewire.kernels.ops import cap


@dataclass
class CappedOutput:
    """A linear layer, and what becomes of its results; see `Kernels.cap`."""

    linear: Linear
    scale: float = 1.0
    softcap: float | None = None
    in_features: int = field(init=False)
    out_features: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        linear = self.linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype, self.num_bytes = linear.dtype, linear.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V]."""
        with as_they_are():
            return cap(self.linear(x), self.scale, self.softcap)
