"""What changes attention's logits before the softmax, in plain PyTorch; a part of `reference`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.kernels.elementwise import elementwise


class Bias(NamedTuple):
    """The changes to the logits of a request of `seq_len` tokens; see `attention.paged_attention`."""

    window: int | None
    future: int
    seq_len: int
    softcap: float | None
    alibi: Tensor | None
    relative: Tensor | None

    def apply(self, logits: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Logits [heads, Q, K] of queries at positions [Q, 1] and keys at [K]; -inf where a key is hidden."""
        if self.softcap:
            logits = self.softcap * elementwise(torch.tanh, logits / self.softcap)
        if self.alibi is not None:
            logits = logits + self.alibi[:, None, None] * (keys - queries)
        if self.relative is not None:
            logits = logits + self._of_distances(self.relative, keys - queries).to(logits)
        hidden = (keys > queries + self.future) | (keys >= self.seq_len)
        if self.window is not None:
            hidden |= keys <= queries - self.window
        return logits.masked_fill(hidden, float("-inf"))

    def _of_distances(self, table: Tensor, distances: Tensor) -> Tensor:
        """Biases [heads, Q, K] of distances [Q, K]; the table [heads, 2 R] begins with that of -R."""
        radius = table.shape[1] // 2
        if self.seq_len > radius:
            raise ValueError(f"a bias of distances up to {radius} is too small for {self.seq_len} tokens")
        return table[:, (distances + radius).clamp(0, 2 * radius - 1)]
