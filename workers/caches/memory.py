"""What caches and states take of a device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Allocator(Protocol):
    """Gives memory for tensors; every `Device` does."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in memory of its own.

        Raises:
            OSError: not enough memory.
        """
