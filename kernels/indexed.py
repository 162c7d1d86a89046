"""Indexed attention (DeepSeek-AI 2025, "DeepSeek-V3.2"): a token sees the keys that an indexer scores highest.

The indexer has a key of its own for each token, which is cached beside the latent. The score of a key is the sum of
`weight * relu(query . key)` over the indexer's heads; of equal scores that of the earlier key counts as higher. So
what a token sees depends on its request alone. Layers without an indexer see what the layer before them has chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.ops import linear
from pagewire.kernels.reference.kernels import IndexScores

SCORES = 1 << 22
"""The most scores of single heads in memory at once, float32. With fewer, calls take more time than products."""
PADDED_SCORES = 1 << 24
"""The most scores of a kernel in memory at once, float32, and as many int64 twice."""


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
            self._store(cache.index.flatten(0, 1), batch.slot_mapping)
            if batch.max_seq_len > self.num_chosen:
                score = implementation_for(self.queries, self.keys).index_scores.get(self.keys.shape[1])
                if score is None:
                    self._chosen = self._by_request(cache.index, batch)
                else:
                    self._chosen = self._at_once(score, cache.index, batch)
        return self._chosen

    def _store(self, index: Tensor, slots: Tensor) -> None:
        """Store the keys in those slots of the cache [num_slots, size] that are not -1, without waiting."""
        stored = slots >= 0
        first = stored.int().argmax()[None]  # tokens without a slot write once more what this one writes
        target = slots[first].clamp_min(0)
        keys = torch.where(stored[first, None], self.keys[first], index[target])
        index[torch.where(stored, slots, target)] = torch.where(stored[:, None], self.keys, keys)

    def _at_once(self, score: IndexScores, index: Tensor, batch: AttentionBatch) -> Tensor:
        """What all tokens see, by a kernel's scores of as many keys for each, without waiting for the device."""
        num_tokens = len(self.keys)
        step = max(1, PADDED_SCORES // batch.max_seq_len)
        rows = (range(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step))
        scored = (score(self.queries, self.weights, self.scale, index, batch, part) for part in rows)
        return torch.cat([largest(_ordered(scores), self.num_chosen) for scores in scored])

    def _by_request(self, index: Tensor, batch: AttentionBatch) -> Tensor:
        """What all tokens see, request by request."""
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
        return _ordered(scores).masked_fill_(later, -torch.inf)


def _ordered(scores: Tensor) -> Tensor:
    """The scores, in their memory, with those that are no numbers below all others."""
    return scores.nan_to_num_(-torch.inf, torch.inf, -torch.inf)


def largest(scores: Tensor, count: int) -> Tensor:
    """The places int32 [n, count] of the largest scores [n, L], ascending; of equal ones the first."""
    least = scores.topk(count, dim=1).values[:, -1:]
    above, equal = scores > least, scores == least
    missing = count - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= missing))
    # `nonzero` would wait. A place goes where as many chosen ones are before it, others behind the last.
    columns = torch.where(chosen, chosen.cumsum(1) - 1, count)
    places = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device).expand_as(columns)
    return places.new_empty(len(scores), count + 1).scatter_(1, columns, places)[:, :count].contiguous()
