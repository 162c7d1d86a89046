"""What changes attention's logits before the softmax, in plain PyTorch; a part of `reference`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.elementwise import elementwise


class Bias(NamedTuple):
    """The changes to the logits of a request of `seq_len` tokens; see `attention.paged_attention`."""

    window: int | None
    future: int
    seq_len: int
    softcap: float | None
    alibi: Tensor | None
    relative: Tensor | None

    def mask(self, heads: int, first: int, like: Tensor) -> Tensor | None:
        """What is added to the logits of the tokens from `first` on: [heads or 1, n, seq_len]; None: nothing is.

        like: of the logits' dtype and device.
        """
        by_head = self.alibi is not None or self.relative is not None
        if not by_head and self.window is None and self.future >= self.seq_len:
            return None
        keys = torch.arange(self.seq_len, device=like.device)
        zeros = like.new_zeros(heads if by_head else 1, self.seq_len - first, self.seq_len)
        return self.apply(zeros, keys[first:, None], keys)

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


def attend_at_once(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Bias) -> Tensor:
    """Attention of a request's last n tokens, by one call of PyTorch's own.

    Args:
        q: [n, heads, D].
        k: [heads, L, D], of all tokens.
        v: [heads, L, Dv], likewise.
        scale: of the dot products.
        bias: without a softcap.

    Returns:
        [n, heads, Dv].
    """
    mask = bias.mask(q.shape[1], bias.seq_len - len(q), q)
    attended = functional.scaled_dot_product_attention(
        *(q.transpose(0, 1)[None], k[None], v[None]),
        attn_mask=None if mask is None else mask[None],
        scale=scale,
    )
    return attended[0].transpose(0, 1)
