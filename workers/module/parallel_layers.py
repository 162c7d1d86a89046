"""Modules of a rank that has a part of the model: they put together what the ranks have."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from pagewire.kernels.data.weight import Linear
from pagewire.workers.module.shards import Shards, head_size
from pagewire.workers.ranks.cut import Cut
from pagewire.workers.ranks.interface import Collective

QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
QUERY_WIDTHS, KEY_WIDTHS = ("split_size", "embed_dim"), ("kv_dim",)


class Gather:
    """Puts vectors together that are divided over the ranks.

    spans: the places of each rank; ranks may have the same ones. own: those of this rank. size: of all together.
    """

    def __init__(self, spans: Sequence[range], collective: Collective) -> None:
        self.spans, self.collective = spans, collective
        self.own, self.size = spans[collective.rank], max(span.stop for span in spans)
        self._width = max(map(len, spans))
        index = torch.empty(self.size, dtype=torch.long)
        for rank, span in enumerate(spans):
            index[span.start : span.stop] = torch.arange(len(span)) + rank * self._width
        in_order = torch.equal(index, torch.arange(self.size)) and self.size == len(spans) * self._width
        self._index = None if in_order else index

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., n] of this rank's places to [..., all places]."""
        if missing := self._width - x.shape[-1]:
            x = F.pad(x, (0, missing))
        whole = self.collective.all_gather(x.contiguous())
        return whole if self._index is None else whole.index_select(-1, self._index.to(whole.device))


class GatheredLinear:
    """A linear layer whose outputs are divided over the ranks, with all of them on every rank."""

    def __init__(self, linear: Linear, gather: Gather) -> None:
        self.linear, self.gather = linear, gather
        self.in_features, self.out_features = linear.in_features, gather.size
        self.dtype, self.num_bytes = linear.dtype, linear.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features], the same on all ranks.

        Outputs after a rank's part (tokens that adapters bring) come after the parts of all ranks.
        """
        out = self.linear(x)
        num_own = self.linear.out_features
        whole = self.gather(out[..., :num_own])
        return whole if out.shape[-1] == num_own else torch.cat([whole, out[..., num_own:]], -1)


class DividedEmbedding(nn.Module):
    """An embedding whose rows are divided over the ranks; each looks up the tokens of its own rows.

    rows: the embedding of this rank's tokens, whose ids count from the first of them. Tokens that adapters bring
    are behind those of the last rank.
    """

    def __init__(self, rows: nn.Module, own: range, collective: Collective) -> None:
        super().__init__()
        self.rows, self.own, self.collective = rows, own, collective
        self.embedding_dim: Any = rows.embedding_dim

    @property
    def weight(self) -> Any:
        """This rank's rows."""
        return self.rows.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids int64 [...] to embeddings [..., H], the same on all ranks."""
        places = ids - self.own.start
        is_own = places >= 0
        if self.collective.rank < self.collective.size - 1:
            is_own &= places < len(self.own)
        states = self.rows(torch.where(is_own, places, 0))
        # All but one of the terms are 0, so the sum has the bits of the row.
        return self.collective.all_reduce(torch.where(is_own[..., None], states, 0).to(states.dtype))


def divided_embedding(module: Any, rows: Tensor, cut: Cut, collective: Collective) -> DividedEmbedding:
    """An embedding module, perhaps one that scales, over this rank's rows [n, H]."""
    own = copy.copy(module)
    own._parameters = {"weight": nn.Parameter(rows, requires_grad=False)}
    own._buffers = dict(module._buffers)
    own.num_embeddings, own.padding_idx = len(rows), None
    return DividedEmbedding(own, cut.own[0], collective)


def fit_modules(base: nn.Module, prefix: str, shards: Shards) -> None:
    """Make modules that run as halves of layers, or predict tokens ahead, compute with this rank's part.

    Their attention implementation must be set before, since they get configurations of their own.

    prefix: of the base's names in the causal module.
    """
    for name, heads in shards.heads.items():
        attention: Any = base.get_submodule(name.removeprefix(f"{prefix}."))
        query, kv = heads.share(shards.collective.rank, shards.collective.size)
        _fit_attention(attention, heads.num, len(query), heads.num_kv, len(kv))
    rank = shards.collective.rank
    for name, cuts in shards.mixers.items():
        mixer: Any = base.get_submodule(name.removeprefix(f"{prefix}."))
        vars(mixer).update(cuts.sizes[rank])
        if cuts.normed is not None:
            mixer.gather = Gather([span for (span,) in cuts.normed], shards.collective)


def _fit_attention(attention: Any, num: int, own_num: int, num_kv: int, own_kv: int) -> None:
    size = head_size(attention)
    changes = {
        **dict.fromkeys(QUERY_COUNTS, (num, own_num)),
        **dict.fromkeys(KEY_COUNTS, (num_kv, own_kv)),
        **dict.fromkeys(QUERY_WIDTHS, (num * size, own_num * size)),
        **dict.fromkeys(KEY_WIDTHS, (num_kv * size, own_kv * size)),
    }
    for name, (whole, own) in changes.items():
        if getattr(attention, name, None) == whole:
            setattr(attention, name, own)
    if hasattr(attention, "config"):
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads = own_num
