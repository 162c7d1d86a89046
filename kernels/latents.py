"""Multi-head latent attention on its compressed cache (DeepSeek-AI 2024, "DeepSeek-V2", 2.1).

A token's keys and values of all heads are products of one latent. The latent is cached, and behind it the rotated
part of the key: one head, whose first elements are its values, too. The products move to the other side of
attention. Queries are multiplied by the keys' part of their matrix, and weighted sums of latents by the values'
part. Prompts and single tokens take one way, so a token's bits do not depend on how its prompt was cut. Expanding
the keys of a long prompt would be faster: attention to latents of DeepSeek's sizes multiplies 3.4 times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.deltas import AdaptedLinear, Delta, plain
from pagewire.kernels.data.latents import HeadProducts, LatentHeads
from pagewire.kernels.data.weight import Linear
from pagewire.kernels.experts import grouped_product

HeadProduct = Callable[[Tensor], Tensor]
"""Rows [n, H, K] times a matrix of each head: [n, H, N]."""


class GroupedHeads:
    """The products of a layer's heads, with what adapters change in them.

    heads: the `LatentHeads`, or these as a layer that asks for the adapters of its rows; is_adapted: it does.
    """

    def __init__(self, heads: Linear, device: torch.device) -> None:
        own = plain(heads)
        assert isinstance(own, LatentHeads)
        self.heads, self.sizes, self.is_adapted = heads, own, isinstance(heads, AdaptedLinear)
        self.by_keys, self.by_values = (_by_head(products, device) for products in (own.keys, own.values))

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return self.heads.num_bytes

    @property
    def is_changed(self) -> bool:
        """True if an adapter of the running step changes them, which compiled layers do not do."""
        return next(self._changes(), None) is not None

    def queries(self, q: Tensor) -> Tensor:
        """Queries [T, H, nope] of expanded keys as those of latents, [T, H, rank]."""
        latent = self.by_keys(q)
        for rows, change in self._changes():
            latent[rows] = change.by_keys(q[rows]).to(latent.dtype)
        return latent

    def outputs(self, latents: Tensor) -> Tensor:
        """Weighted sums [T, H, rank] of latents as those of values, [T, H, Dv]."""
        out = self.by_values(latents)
        for rows, change in self._changes():
            out[rows] = change.by_values(latents[rows]).to(out.dtype)
        return out

    def _changes(self) -> Iterator[tuple[Tensor, AdaptedHeads]]:
        """What adapters of the running step change in them, with their rows int64 [n]."""
        if not isinstance(self.heads, AdaptedLinear) or (rows := self.heads.rows()) is None:
            return
        for adapter, index in rows.groups():
            for delta in adapter.products[self.heads.number]:
                yield index, AdaptedHeads(self, delta)


@dataclass(frozen=True)
class AdaptedHeads:
    """A layer's heads with what an adapter changes in them, in float32."""

    heads: GroupedHeads
    delta: Delta

    def by_keys(self, queries: Tensor) -> Tensor:
        """See `GroupedHeads.by_keys`."""
        delta = self.delta
        if delta.b is None:
            return _each(queries.float(), self._halves(delta.a)[0].transpose(1, 2))
        if delta.gain is not None:
            queries = queries * self._halves(delta.gain)[0].to(queries.dtype)
        low = _each(queries.float(), self._halves(delta.second)[0].transpose(1, 2))
        return self.heads.by_keys(queries) + delta.scale * functional.linear(low, delta.a.float().T)

    def by_values(self, latents: Tensor) -> Tensor:
        """See `GroupedHeads.by_values`. A shift of keys changes no probability, and so only values are shifted."""
        delta = self.delta
        if delta.b is None:
            out = _each(latents.float(), self._halves(delta.a)[1])
        else:
            low = delta.scale * functional.linear(latents.float(), delta.a.float())
            out = self.heads.by_values(latents) + _each(low, self._halves(delta.second)[1])
        out = out if delta.gain is None else out * self._halves(delta.gain)[1]
        return out if delta.shift is None else out + self._halves(delta.shift)[1]

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [H (nope + Dv), ...] as those of keys [H, nope, ...] and of values [H, Dv, ...]."""
        sizes = self.heads.sizes
        by_head = x.float().view(sizes.num_heads, -1, *x.shape[1:])
        return by_head[:, : sizes.nope], by_head[:, sizes.nope :]


def _by_head(products: HeadProducts, device: torch.device) -> HeadProduct:
    if isinstance(products, Tensor):
        return lambda x: torch.bmm(x.transpose(0, 1), products).transpose(0, 1)
    return _grouped(products, device)


def _grouped(linears: Sequence[Linear], device: torch.device) -> HeadProduct:
    product, num_heads = grouped_product(linears, device), len(linears)

    def by_head(x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, x.shape[2])
        return product(rows, [len(x)] * num_heads).view(num_heads, len(x), -1).transpose(0, 1)

    return by_head


def _each(x: Tensor, weights: Tensor) -> Tensor:
    """x [n, H, K] times a matrix of each head [H, N, K]: [n, H, N]."""
    return torch.stack(
        [functional.linear(rows, weight) for rows, weight in zip(x.unbind(1), weights, strict=True)], 1
    )
