"""Multi-head latent attention on its compressed cache (DeepSeek-AI 2024, "DeepSeek-V2", 2.1).

A token's keys and values of all heads are products of one latent with `kv_b_proj`. The latent is what is cached, with
the rotated part of the key behind it: one head, whose first elements are its values, too. The products move to
the other side of attention. Queries are multiplied by the keys' half of `kv_b_proj`, and what attention has summed
up of latents, by the values' half. So prompts and single tokens take one way, and a token's bits do not depend on
how its prompt was cut.

All families of transformers with such attention have a method `expand_kv`, behind which they call attention.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.data.layer import Experts
from pagewire.kernels.data.weight import dense_weight
from pagewire.kernels.experts import GroupedProduct, grouped_products
from pagewire.kernels.linear import dense
from pagewire.workers.module.products import packed
from pagewire.workers.module.weights import Weights


class LatentHeads:
    """The two halves of a layer's `kv_b_proj`, a matrix for each head, packed as those of experts are.

    keys: products of queries [n, nope] to [n, rank], by head. values: of summed latents [n, rank] to [n, Dv].
    """

    def __init__(self, experts: Experts, device: torch.device) -> None:
        self.num_heads, self.num_bytes = len(experts.up), experts.num_bytes
        self.rank, self.nope = experts.up[0].out_features, experts.up[0].in_features
        self._keys, self._values = grouped_products(experts, device)

    def queries(self, q: Tensor) -> Tensor:
        """Queries [T, H, nope + rope] of expanded keys as those of latents, [T, H, rank + rope]."""
        nope, rope = q.split([self.nope, q.shape[2] - self.nope], 2)
        return torch.cat([self._by_head(self._keys, nope), rope], 2)

    def outputs(self, latents: Tensor) -> Tensor:
        """Weighted sums [T, H, rank] of latents as those of values, [T, H, Dv]."""
        return self._by_head(self._values, latents)

    def _by_head(self, product: GroupedProduct, x: Tensor) -> Tensor:
        """x [T, H, K] times the matrices of the heads: [T, H, N]."""
        rows = x.transpose(0, 1).reshape(-1, x.shape[2])
        return product(rows, [len(x)] * self.num_heads).view(self.num_heads, len(x), -1).transpose(0, 1)


def absorb_latents(module: nn.Module, weights: Weights, device: torch.device) -> None:
    """Let the latent attention within a module attend to latents, in place of keys and values that it expands."""
    for child in list(module.modules()):
        if hasattr(child, "kv_b_proj") and hasattr(child, "expand_kv"):
            attention: Any = child
            attention.latent_heads = latent_heads(attention, weights, device)
            attention.expand_kv = MethodType(_latent_and_rotated, attention)
            del attention.kv_b_proj


def latent_heads(attention: Any, weights: Weights, device: torch.device) -> LatentHeads:
    """The halves of an attention module's `kv_b_proj`, or this rank's heads of it; dequantised."""
    nope, size = attention.qk_nope_head_dim, attention.v_head_dim
    heads = dense(weights.matrix(attention.kv_b_proj)).unflatten(0, (-1, nope + size))
    keys = [packed(dense_weight(head[:nope].T), None, device) for head in heads]
    values = [packed(dense_weight(head[nope:]), None, device) for head in heads]
    weights.let_go()
    return LatentHeads(Experts(keys, values, None), device)


def _latent_and_rotated(_: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `expand_kv`: keys [1, 1, T, rank + rope], and their first elements as values [1, 1, T, rank]."""
    keys = torch.cat([latent, rotated], -1)
    return keys, keys[..., : latent.shape[-1]]
