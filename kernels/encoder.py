"""A stack of an encoder's layers: each half is added to its input, and the sum is normed.

x -> QKV in one product -> (rotary) -> attention to later tokens, too -> output product -> add and norm
  -> up product (and gate) -> activation -> down product -> add and norm -> next layer

As in BERT, the normed sum is what goes on; or, with norms first, it is what the next product takes, and the sum
itself goes on.

The loop over the layers is here; `cpu/encoder.cpp` is the same loop compiled, and is used if all linear layers are
packed weights, dense or quantised. On GPUs the kernels are launched one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.layer import Angles, EncoderLayer, LayerNorm
from pagewire.kernels.ops import (
    activate_and_mul,
    activate_each,
    layer_norm,
    paged_attention,
    rotate_and_store,
    store_kv,
)
from pagewire.kernels.paging import AttentionBatch, Cache

__all__ = ["EncoderLayer", "EncoderStack", "LayerNorm"]


class EncoderStack:
    """A stack of an encoder's layers; a single call where the device's kernels allow it.

    norm_first: the sums themselves go on from layer to layer, and each half begins with a norm: a layer's
        `attention_norm` is that of its feed-forward half, `output_norm` the next layer's first, or that of the
        stack's output. Otherwise the normed sums go on.
    input_norm: before the first layer's attention, with `norm_first`; None: there is none.
    """

    def __init__(
        self, layers: Sequence[EncoderLayer], input_norm: LayerNorm | None = None, *, norm_first: bool = False
    ) -> None:
        if input_norm is not None and not norm_first:
            raise ValueError("a norm before the first layer is one of layers that begin with a norm")
        self.layers, self.input_norm, self.norm_first = layers, input_norm, norm_first
        kernels = implementation_for(layers[0].output_norm.weight)
        self.compiled = kernels.encoder(layers, input_norm, norm_first=norm_first)

    def __call__(
        self,
        x: Tensor,
        batch: AttentionBatch,
        cache: Cache,
        angles: Sequence[Angles] = (),
    ) -> Tensor:
        """Run whole prompts through all layers.

        Args:
            x: [T, H], contiguous; may be overwritten.
            batch: see `AttentionBatch`; of whole prompts, without padding.
            cache: which every layer overwrites.
            angles: tables of cosines and sines [T, rot_dim], see `Kernels.rotary`; a layer says which is its own.

        Returns:
            [T, H].
        """
        if self.compiled is not None:
            return self.compiled(x, batch, cache, angles)
        residual = x
        if self.input_norm is not None:
            x = _norm(x, self.input_norm)
        for layer in self.layers:
            x, residual = self._add(
                layer.out(_attend(layer, x, batch, cache, angles)), residual, layer.attention_norm
            )
            up = layer.up(x)
            activate = activate_and_mul if layer.gated else activate_each
            x, residual = self._add(layer.down(activate(up, layer.activation)), residual, layer.output_norm)
        return x

    def _add(self, x: Tensor, residual: Tensor, norm: LayerNorm) -> tuple[Tensor, Tensor]:
        """What the next product takes, and what the next sum begins with."""
        total = residual + x
        normed = _norm(total, norm)
        return normed, total if self.norm_first else normed


def _norm(x: Tensor, norm: LayerNorm) -> Tensor:
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


def _attend(
    layer: EncoderLayer,
    x: Tensor,
    batch: AttentionBatch,
    cache: Cache,
    angles: Sequence[Angles],
) -> Tensor:
    num_tokens = len(x)
    qkv = layer.qkv(x).view(num_tokens, -1, layer.head_dim)
    q, k, v = torch.split(qkv, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
    if layer.angles is None:
        store_kv(k, v, cache, batch.slot_mapping)
    else:
        q = rotate_and_store(q, k, v, angles[layer.angles], None, cache, batch.slot_mapping)
    attended = paged_attention(q, cache, batch, layer.scale, layer.terms)
    return attended.view(num_tokens, -1)
