"""What changes attention's logits before the softmax, in plain PyTorch; a part of `reference`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.elementwise import elementwise
from pagewire.kernels.paging import LogitTerms


def apply_terms(terms: LogitTerms, logits: Tensor, queries: Tensor, keys: Tensor, seq_len: int) -> Tensor:
    """Logits [heads, Q, K] of queries at positions [Q, 1] and keys at [K]; -inf where a key is hidden."""
    if terms.softcap:
        logits = terms.softcap * elementwise(torch.tanh, logits / terms.softcap)
    if terms.alibi is not None:
        logits = logits + terms.alibi.to(logits)[:, None, None] * (keys - queries)
    if terms.relative_bias is not None:
        logits = logits + _of_distances(terms.relative_bias, keys - queries, seq_len).to(logits)
    hidden = (keys > queries + terms.future) | (keys >= seq_len)
    if terms.window is not None:
        hidden |= keys <= queries - terms.window
    return logits.masked_fill(hidden, float("-inf"))


def _of_distances(table: Tensor, distances: Tensor, seq_len: int) -> Tensor:
    """Biases [heads, Q, K] of distances [Q, K]; the table [heads, 2 R] begins with that of -R."""
    radius = table.shape[1] // 2
    if seq_len > radius:
        raise ValueError(f"a bias of distances up to {radius} is too small for {seq_len} tokens")
    return table[:, (distances + radius).clamp(0, 2 * radius - 1)]


def attend_at_once(q: Tensor, k: Tensor, v: Tensor, scale: float, terms: LogitTerms) -> Tensor:
    """Attention of a request's last n tokens, by one call of PyTorch's own.

    Args:
        q: [n, heads, D].
        k: [heads, L, D], of all tokens.
        v: [heads, L, Dv], likewise.
        scale: of the dot products.
        terms: without softcap and sinks.

    Returns:
        [n, heads, Dv].
    """
    mask = _mask(terms, q, k.shape[1])
    attended = functional.scaled_dot_product_attention(
        *(q.transpose(0, 1)[None], k[None], v[None]),
        attn_mask=None if mask is None else mask[None],
        scale=scale,
    )
    return attended[0].transpose(0, 1)


def _mask(terms: LogitTerms, q: Tensor, seq_len: int) -> Tensor | None:
    """What is added to the logits of queries [n, heads, D]: [heads or 1, n, seq_len]; None: nothing is."""
    by_head = terms.alibi is not None or terms.relative_bias is not None
    if not by_head and terms.window is None and terms.future >= seq_len:
        return None
    keys = torch.arange(seq_len, device=q.device)
    zeros = q.new_zeros(q.shape[1] if by_head else 1, len(q), seq_len)
    return apply_terms(terms, zeros, keys[seq_len - len(q) :, None], keys, seq_len)
