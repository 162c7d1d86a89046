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

from pagewire.kernels.adapted import adapt
from pagewire.kernels.deltas import AdapterRows
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.experts import GroupedExperts
from pagewire.kernels.layer import Activation, Angles, Layer, Norm, mixture_products
from pagewire.kernels.ops import (
    activate_and_mul,
    add_gated,
    add_rms_norm,
    paged_attention,
    rms_norm,
    rotate_and_store,
    route,
)
from pagewire.kernels.paging import AttentionBatch, Cache
from pagewire.kernels.reduced import Sum
from pagewire.kernels.weight import Linear

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
        self._numbers = mixture_products(layers)

    def __call__(
        self,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        caches: Sequence[Cache],
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """Run the batch's tokens through all layers.

        Args:
            residual: [T, H], contiguous; overwritten.
            cos: [T, rot_dim], see `Kernels.rotary`.
            sin: likewise.
            batch: see `AttentionBatch`.
            caches: of each layer.
            adapters: the rows that have adapters, whose products have the numbers of `layer.product_shapes`.

        Returns:
            [T, H], normed by the last layer's `next_norm`.
        """
        if self.compiled is not None:
            return self.compiled(residual, cos, sin, batch, caches, adapters)
        norm = self.input_norm
        x = rms_norm(residual, norm.weight, norm.eps, offset=norm.offset)
        parts = zip(self.layers, self._experts, caches, strict=True)
        for i, (layer, experts, cache) in enumerate(parts):
            products = Products(layer, 4 * i, self._numbers[i], adapters)
            attended = _attend(layer, products.qkv(x), (cos, sin), batch, cache)
            x = _add(_add_up(products.out(attended), layer.ranks), residual, layer.attention_norm)
            x = products.feed_forward(x) if experts is None else products.mixture(x, experts)
            x = _add(_add_up(x, layer.ranks), residual, layer.next_norm)
        return x


class Products:
    """The products of a layer, with what adapters change in them.

    first: the number of the layer's first product. of_mixture: of its mixture's first one.
    """

    def __init__(self, layer: Layer, first: int, of_mixture: int, adapters: AdapterRows | None) -> None:
        self._layer, self._first, self._of_mixture, self._adapters = layer, first, of_mixture, adapters

    def qkv(self, x: Tensor) -> Tensor:
        """See `Layer.qkv`."""
        return self._product(self._layer.qkv, self._first, x)

    def out(self, x: Tensor) -> Tensor:
        """See `Layer.out`."""
        return self._product(self._layer.out, self._first + 1, x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The gated feed-forward half [T, H] of x [T, H]."""
        layer = self._layer
        assert layer.gate_up is not None and layer.down is not None
        gated = activate_and_mul(self._product(layer.gate_up, self._first + 2, x), layer.activation)
        return self._product(layer.down, self._first + 3, gated)

    def mixture(self, x: Tensor, experts: GroupedExperts) -> Tensor:
        """The feed-forward half [T, H] of the experts that the layer's router chooses for x [T, H]."""
        mixture, number = self._layer.mixture, self._of_mixture
        assert mixture is not None
        chosen = route(self._product(mixture.router.linear, number, x), mixture.router)
        out = experts(x, *chosen, self._adapters, number + 2)
        if mixture.shared_gate is not None:
            add_gated(out, self.feed_forward(x), self._product(mixture.shared_gate, number + 1, x))
        return out

    def _product(self, linear: Linear, number: int, x: Tensor) -> Tensor:
        out = linear(x)
        if self._adapters is not None:
            adapt(x, out, self._adapters, number)
        return out


def _add_up(x: Tensor, ranks: Sum | None) -> Tensor:
    return x if ranks is None else ranks.all_reduce(x)


def _add(x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
    return add_rms_norm(x, residual, norm.weight, norm.eps, offset=norm.offset)


def _attend(layer: Layer, qkv: Tensor, angles: Angles, batch: AttentionBatch, cache: Cache) -> Tensor:
    num_tokens = len(qkv)
    heads = qkv.view(num_tokens, -1, layer.head_dim)
    q, k, v = torch.split(heads, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
    q = rotate_and_store(q, k, v, angles, layer.head_norms, cache, batch.slot_mapping)
    attended = paged_attention(q, cache, batch, layer.scale, layer.terms)
    return attended.view(num_tokens, -1)
