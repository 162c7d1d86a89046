"""Indexed attention (DeepSeek-AI 2025, "DeepSeek-V3.2"): a token sees the keys that an indexer scores highest.

The indexer has a key of its own for each token, which is cached beside the latent. The score of a key is the sum of
`weight * relu(query . key)` over the indexer's heads; of equal scores that of the earlier key counts as higher. So
what a token sees depends on its request alone. Layers without an indexer see what the layer before them has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.kernels.ops import linear

SCORES = 1 << 22
"""The most scores of single heads in memory at once, float32. With fewer, calls take more time than products."""


@dataclass
class IndexedTokens:
    """What a layer's indexer makes of the tokens of a step: it chooses which keys they see.

    queries: [T, heads, size]. keys: [T, size]. weights: float32 [T, heads]. num_chosen: keys that a token sees.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    weights: Tensor
    scale: float
    num_chosen: int
    _chosen: Tensor | None = field(default=None, init=False)

    def choose(self, layer: int, cache: Cache, batch: AttentionBatch) -> Tensor | None:
        """See `LogitTerms.chosen`; None if all tokens see all keys before them.

        layer: which attends; if it is the indexer's own, the tokens' keys are stored in its cache first.
        """
        if layer == self.layer:
            assert cache.index is not None
            is_stored = batch.slot_mapping >= 0
            cache.index.flatten(0, 1)[batch.slot_mapping[is_stored]] = self.keys[is_stored]
            if batch.max_seq_len > self.num_chosen:
                self._chosen = self._of_batch(cache.index, batch)
        return self._chosen

    def _of_batch(self, index: Tensor, batch: AttentionBatch) -> Tensor:
        chosen = torch.zeros(len(self.keys), self.num_chosen, dtype=torch.int32, device=index.device)
        starts = batch.query_start_loc.tolist()
        for request, ((start, stop), length) in enumerate(
            zip(pairwise(starts), batch.seq_lens.tolist(), strict=True)
        ):
            if length <= self.num_chosen:
                chosen[start:stop] = torch.arange(self.num_chosen, device=index.device)
                continue
            blocks = batch.block_table[request, : -(-length // index.shape[1])].long()
            keys = index[blocks].flatten(0, 1)[:length].float()
            step = max(1, SCORES // (self.weights.shape[1] * length))
            for first in range(start, stop, step):
                last = min(first + step, stop)
                positions = torch.arange(length - stop + first, length - stop + last, device=index.device)
                seen = keys[: max(self.num_chosen, length - stop + last)]
                scores = self._scores(slice(first, last), seen, positions)
                chosen[first:last] = largest(scores, self.num_chosen)
        return chosen

    def _scores(self, rows: slice, keys: Tensor, positions: Tensor) -> Tensor:
        """Scores float32 [n, L] of tokens at positions [n] for keys [L, size]; -inf for those after a token."""
        products = linear(self.queries[rows].float().flatten(0, 1), keys, None)
        by_head = products.mul_(self.scale).relu_().view(len(positions), -1, len(keys)).unbind(1)
        scores = torch.zeros_like(by_head[0])
        for head, weights in zip(by_head, self.weights[rows].unbind(1), strict=True):
            scores += weights[:, None] * head
        later = torch.arange(len(keys), device=keys.device) > positions[:, None]
        return scores.nan_to_num_(-torch.inf, torch.inf, -torch.inf).masked_fill_(later, -torch.inf)


def largest(scores: Tensor, count: int) -> Tensor:
    """The places int32 [n, count] of the largest scores [n, L], ascending; of equal ones the first."""
    least = scores.topk(count, dim=1).values[:, -1:]
    above, equal = scores > least, scores == least
    missing = count - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= missing))
    return chosen.nonzero()[:, 1].view(-1, count).int()


def index_tokens(
    module: Any,
    rotate: Callable[..., tuple[Tensor, Tensor]] | None,
    hidden: Tensor,
    queries: Tensor,
    angles: tuple[Tensor, Tensor],
    at_end: bool = False,
) -> IndexedTokens:
    """What an indexer of transformers makes of hidden states [1, T, H] and its queries [1, T, heads * size].

    rotate: the family's rotation of queries and keys [1, T, heads, rope] by its cosines and sines, `angles`; None:
    nothing is rotated. at_end: the last elements of a head are rotated, not the first.
    """
    queries = queries.view(*queries.shape[:-1], module.n_heads, module.head_dim)
    norm = module.k_norm
    keys = norm(module.wk(hidden).to(norm.weight.dtype)).to(hidden.dtype).unsqueeze(2)
    if rotate is not None:
        rope, size = module.qk_rope_head_dim, module.head_dim
        turned = slice(size - rope, size) if at_end else slice(rope)
        rotated = rotate(queries[..., turned], keys[..., turned], *angles, unsqueeze_dim=2)
        queries, keys = queries.clone(), keys.clone()
        queries[..., turned], keys[..., turned] = rotated
    weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype)).float() * module.n_heads**-0.5
    return IndexedTokens(
        module.layer_idx, queries[0], keys[0, :, 0], weights[0], module.softmax_scale, module.index_topk
    )
