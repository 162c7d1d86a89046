"""A stack of Llama-like layers: attention, then a gated feed-forward, each with its norm and residual.

x -> QKV in one product -> (norm of each head) -> rotary -> attention -> output product -> add and norm
  -> gate and up in one product -> activation -> down product -> add and norm -> next layer

In place of the feed-forward half, or beside it as a shared expert, a layer may have experts and a router.

The loop over the layers is here, for every device. `cpu/decoder.cpp` is the same loop compiled; it is used if all
linear layers are packed weights, dense or quantised.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.experts import ACTIVATIONS, GroupedExperts, add_gated, route
from pagewire.kernels.layer import Activation, Layer, Norm
from pagewire.kernels.layers import add_rms_norm, rms_norm
from pagewire.kernels.paging import UNSCALED, AttentionBatch, KVScales
from pagewire.kernels.reduced import Sum

__all__ = ["Activation", "Layer", "Norm", "Stack"]


class Stack:
    """A stack of layers and the norm before the first; a single call where the device's kernels allow it."""

    def __init__(self, input_norm: Norm, layers: Sequence[Layer]) -> None:
        self.input_norm, self.layers = input_norm, layers
        self.compiled = implementation_for(input_norm.weight).stack(input_norm, layers)
        self._experts = [
            None if layer.mixture is None else GroupedExperts(layer.mixture.experts, input_norm.weight.device)
            for layer in layers
        ]

    def __call__(
        self,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        caches: Sequence[tuple[Tensor, Tensor]],
        scales: Sequence[KVScales] = (),
    ) -> Tensor:
        """Run the batch's tokens through all layers.

        Args:
            residual: [T, H], contiguous; overwritten.
            cos: [T, rot_dim], see `layers.rotary`.
            sin: likewise.
            batch: see `AttentionBatch`.
            caches: K and V of each layer.
            scales: of each layer's keys and values, in caches of 8-bit floats; empty for 1.

        Returns:
            [T, H], normed by the last layer's `next_norm`.
        """
        if self.compiled is not None and not scales:
            return self.compiled(residual, cos, sin, batch, caches)
        norm = self.input_norm
        x = rms_norm(residual, norm.weight, norm.eps, offset=norm.offset)
        scales = scales or [UNSCALED] * len(self.layers)
        for layer, experts, cache, of_cache in zip(self.layers, self._experts, caches, scales, strict=True):
            x = _add_up(layer.out(_attend(layer, x, cos, sin, batch, cache, of_cache)), layer.ranks)
            x = _add(x, residual, layer.attention_norm)
            x = _add_up(
                _feed_forward(layer, x) if experts is None else _mixture(layer, experts, x), layer.ranks
            )
            x = _add(x, residual, layer.next_norm)
        return x


def _add_up(x: Tensor, ranks: Sum | None) -> Tensor:
    return x if ranks is None else ranks.all_reduce(x)


def _add(x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
    return add_rms_norm(x, residual, norm.weight, norm.eps, offset=norm.offset)


def _feed_forward(layer: Layer, x: Tensor) -> Tensor:
    assert layer.gate_up is not None and layer.down is not None
    return layer.down(ACTIVATIONS[layer.activation](layer.gate_up(x)))


def _mixture(layer: Layer, experts: GroupedExperts, x: Tensor) -> Tensor:
    assert layer.mixture is not None
    router, shared_gate = layer.mixture.router, layer.mixture.shared_gate
    out = experts(x, *route(router.linear(x), router))
    if shared_gate is not None:
        add_gated(out, _feed_forward(layer, x), shared_gate(x))
    return out


def _attend(
    layer: Layer,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    batch: AttentionBatch,
    cache: tuple[Tensor, Tensor],
    scales: KVScales,
) -> Tensor:
    num_tokens = len(x)
    qkv = layer.qkv(x).view(num_tokens, -1, layer.head_dim)
    q, k, v = torch.split(qkv, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
    kernels = implementation_for(q, k, v)
    slots = batch.slot_mapping
    q = kernels.rotate_and_store(q, k, v, cos, sin, layer.head_norms, *cache, slots, scales)
    attended = kernels.paged_attention(q, *cache, batch, layer.scale, window=layer.window, scales=scales)
    return attended.view(num_tokens, -1)
