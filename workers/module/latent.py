"""Multi-head latent attention on its compressed cache (DeepSeek-AI 2024, "DeepSeek-V2", 2.1).

A token's keys and values of all heads are products of one latent with `kv_b_proj`. The latent is cached, and behind
it the rotated part of the key: one head, whose first elements are its values, too. The products move to the other
side of attention. Queries are multiplied by the keys' half of `kv_b_proj`, and weighted sums of latents by the
values' half. Prompts and single tokens take one way, so a token's bits do not depend on how its prompt was cut.
Expanding the keys of a long prompt would be faster: attention to latents of DeepSeek's sizes multiplies 3.4 times
as much.

All families of transformers with such attention have a method `expand_kv`, behind which they call attention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from pagewire.kernels.adapted import Adapted
from pagewire.kernels.data.deltas import Delta
from pagewire.kernels.data.layer import Experts
from pagewire.kernels.data.weight import dense_weight
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.experts import grouped_product
from pagewire.kernels.linear import dense
from pagewire.kernels.ops import linear
from pagewire.kernels.reference.kernels import GroupedProduct
from pagewire.workers.module.products import packed
from pagewire.workers.module.weights import Weights


class LatentHeads:
    """The two halves of a layer's `kv_b_proj` [H (nope + Dv), rank], a matrix for each head, packed as experts are.

    adapted: this layer as one that asks for the adapters of its rows; None: adapters are not enabled.
    """

    def __init__(self, heads: Tensor, nope: int, device: torch.device) -> None:
        """heads: by head, the rows of keys and of values, [H, nope + Dv, rank]."""
        self.num_heads, num_rows, self.in_features = heads.shape
        self.nope, self.v_head_dim, self.out_features = nope, num_rows - nope, self.num_heads * num_rows
        self.dtype, self.device = heads.dtype, device
        self.adapted: Adapted | None = None
        if packs_heads(heads.dtype, device):
            keys = [packed(dense_weight(head[:nope].T), None, device) for head in heads]
            values = [packed(dense_weight(head[nope:]), None, device) for head in heads]
            self.num_bytes = Experts(keys, values, None).num_bytes
            self._keys, self._values = (grouped_product(linears, device) for linears in (keys, values))
        else:
            held = heads.to(device).contiguous()
            self.num_bytes = held.nbytes
            self._keys, self._values = batched_product(held[:, :nope]), batched_product(held[:, nope:].mT)

    def queries(self, q: Tensor) -> Tensor:
        """Queries [T, H, nope + rope] of expanded keys as those of latents, [T, H, rank + rope]."""
        nope, rope = q[..., : self.nope], q[..., self.nope :]
        latent = self.by_keys(nope)
        for rows, change in self._changes():
            latent[rows] = change.by_keys(nope[rows]).to(latent.dtype)
        return torch.cat([latent, rope], 2)

    def outputs(self, latents: Tensor) -> Tensor:
        """Weighted sums [T, H, rank] of latents as those of values, [T, H, Dv]."""
        out = self.by_values(latents)
        for rows, change in self._changes():
            out[rows] = change.by_values(latents[rows]).to(out.dtype)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """Latents [..., rank] to keys and values [..., H (nope + Dv)], slowly: by which DoRA learns the weight."""
        keys = self.by_keys(self._unit_rows(self.nope)).transpose(0, 1)
        values = self.by_values(self._unit_rows(self.in_features)).permute(1, 2, 0)
        return linear(x, torch.cat([keys, values], 1).flatten(0, 1), None)

    def _unit_rows(self, size: int) -> Tensor:
        """The rows of a unit matrix for every head, [size, H, size]."""
        return torch.eye(size, dtype=self.dtype, device=self.device)[:, None].expand(-1, self.num_heads, -1)

    def by_keys(self, queries: Tensor) -> Tensor:
        """[n, H, nope] to [n, H, rank]."""
        return self._by_head(self._keys, queries)

    def by_values(self, latents: Tensor) -> Tensor:
        """[n, H, rank] to [n, H, Dv]."""
        return self._by_head(self._values, latents)

    def _changes(self) -> Iterator[tuple[Tensor, AdaptedHeads]]:
        """What adapters of the running step change in this layer, with their rows int64 [n]."""
        if self.adapted is None or (rows := self.adapted.rows()) is None:
            return
        for adapter, index in rows.groups():
            for delta in adapter.products[self.adapted.number]:
                yield index, AdaptedHeads(self, delta)

    def _by_head(self, product: GroupedProduct, x: Tensor) -> Tensor:
        """x [T, H, K] times the matrices of the heads: [T, H, N]."""
        rows = x.transpose(0, 1).reshape(-1, x.shape[2])
        return product(rows, [len(x)] * self.num_heads).view(self.num_heads, len(x), -1).transpose(0, 1)


@dataclass(frozen=True)
class AdaptedHeads:
    """A layer's `LatentHeads` with what an adapter changes in its `kv_b_proj`, in float32."""

    heads: LatentHeads
    delta: Delta

    def by_keys(self, queries: Tensor) -> Tensor:
        """See `LatentHeads.by_keys`."""
        delta = self.delta
        if delta.b is None:
            return _each(queries.float(), self._halves(delta.a)[0].transpose(1, 2))
        if delta.gain is not None:
            queries = queries * self._halves(delta.gain)[0].to(queries.dtype)
        low = _each(queries.float(), self._halves(delta.second)[0].transpose(1, 2))
        return self.heads.by_keys(queries) + delta.scale * F.linear(low, delta.a.float().T)

    def by_values(self, latents: Tensor) -> Tensor:
        """See `LatentHeads.by_values`. A shift of keys changes no probability, and so only values are shifted."""
        delta = self.delta
        if delta.b is None:
            out = _each(latents.float(), self._halves(delta.a)[1])
        else:
            low = delta.scale * F.linear(latents.float(), delta.a.float())
            out = self.heads.by_values(latents) + _each(low, self._halves(delta.second)[1])
        out = out if delta.gain is None else out * self._halves(delta.gain)[1]
        return out if delta.shift is None else out + self._halves(delta.shift)[1]

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [H (nope + Dv), ...] as those of keys [H, nope, ...] and of values [H, Dv, ...]."""
        by_head = x.float().view(self.heads.num_heads, -1, *x.shape[1:])
        return by_head[:, : self.heads.nope], by_head[:, self.heads.nope :]


def _each(x: Tensor, weights: Tensor) -> Tensor:
    """x [n, H, K] times a matrix of each head [H, N, K]: [n, H, N]."""
    return torch.stack([F.linear(rows, weight) for rows, weight in zip(x.unbind(1), weights, strict=True)], 1)


def absorb_latents(module: nn.Module, weights: Weights, device: torch.device) -> None:
    """Let the latent attention within a module attend to latents, in place of keys and values that it expands.

    It goes on expanding them where a GPU has no kernel for latents of their size, or PyTorch found it wrong.
    """
    for child in list(module.modules()):
        if hasattr(child, "kv_b_proj") and hasattr(child, "expand_kv") and takes_latents(child, device):
            attention: Any = child
            attention.latent_heads = latent_heads(attention, weights, device)
            attention.expand_kv = MethodType(_latent_and_rotated, attention)
            del attention.kv_b_proj


def takes_latents(attention: Any, device: torch.device) -> bool:
    """True if the kernels for a module's dtype attend to latents of its sizes."""
    served = served_latents(next(attention.parameters()).dtype, device)
    if served is None:
        return True
    return (attention.kv_lora_rank + attention.qk_rope_head_dim, attention.kv_lora_rank) in served


def packs_heads(dtype: torch.dtype, device: torch.device) -> bool:
    """True if each head's matrices are packed by themselves, as on CPUs; else PyTorch multiplies them at once."""
    return device.type == "cpu" and served_latents(dtype, device) is None


def served_latents(dtype: torch.dtype, device: torch.device) -> Collection[tuple[int, int]] | None:
    """See `Kernels.latents`."""
    return implementation_for(torch.empty(0, dtype=dtype, device=device)).latents


def batched_product(weights: Tensor) -> GroupedProduct:
    """The product of as many rows for each of the weights [H, K, N], in one call of PyTorch."""

    def product(rows: Tensor, counts: Sequence[int]) -> Tensor:
        return torch.bmm(rows.view(len(counts), -1, rows.shape[1]), weights).flatten(0, 1)

    return product


def latent_heads(attention: Any, weights: Weights, device: torch.device) -> LatentHeads:
    """The halves of an attention module's `kv_b_proj`, or this rank's heads of it; dequantised."""
    nope, size = attention.qk_nope_head_dim, attention.v_head_dim
    matrix = dense(weights.matrix(attention.kv_b_proj))
    heads = LatentHeads(matrix.view(-1, nope + size, matrix.shape[1]), nope, device)
    weights.let_go()
    return heads


def _latent_and_rotated(_: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `expand_kv`: keys [1, 1, T, rank + rope], and their first elements as values [1, 1, T, rank]."""
    keys = torch.cat([latent, rotated], -1)
    return keys, keys[..., : latent.shape[-1]]
