"""An output layer whose logits are scaled or capped (Granite, Cohere, Gemma 2)."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def in_features(self) -> int:
        """Numbers of a hidden state."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """The number of logits."""
        return self.linear.out_features

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of states and logits."""
        return self.linear.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weight."""
        return self.linear.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V]."""
        with as_they_are():
            return cap(self.linear(x), self.scale, self.softcap)
