"""A stack of an encoder's layers, as BERT's: each half is added to its input, and the sum is normed.

x -> QKV in one product -> (rotary) -> attention to all tokens of the prompt -> output product -> add and norm
  -> up product (and gate) -> activation -> down product -> add and norm -> next layer

The loop over the layers is here; `cpu/encoder.cpp` is the same loop compiled, and is used if all linear layers are
packed weights, dense or quantised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.attention import paged_attention, store_kv
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.experts import ACTIVATIONS
from pagewire.kernels.layer import EncoderLayer, LayerNorm
from pagewire.kernels.layers import activate_each, layer_norm, rotary
from pagewire.kernels.paging import WHOLE, AttentionBatch

__all__ = ["EncoderLayer", "EncoderStack", "LayerNorm"]


class EncoderStack:
    """A stack of an encoder's layers; a single call where the device's kernels allow it.

    scale: of the dot products of queries and keys.
    """

    def __init__(self, layers: Sequence[EncoderLayer], scale: float) -> None:
        self.layers, self.scale = layers, scale
        self.compiled = implementation_for(layers[0].output_norm.weight).encoder(layers, scale)

    def __call__(
        self,
        x: Tensor,
        batch: AttentionBatch,
        cache: tuple[Tensor, Tensor],
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run whole prompts through all layers.

        Args:
            x: [T, H], contiguous; may be overwritten.
            batch: see `AttentionBatch`; of whole prompts, without padding.
            cache: K and V, which every layer overwrites.
            angles: cosines and sines [T, rot_dim], see `layers.rotary`; None: x holds the positions.

        Returns:
            [T, H].
        """
        if self.compiled is not None:
            return self.compiled(x, batch, cache, angles)
        for layer in self.layers:
            x = _normed(layer.out(self._attend(layer, x, batch, cache, angles)), x, layer.attention_norm)
            up = layer.up(x)
            inner = ACTIVATIONS[layer.activation](up) if layer.gated else activate_each(up, layer.activation)
            x = _normed(layer.down(inner), x, layer.output_norm)
        return x

    def _attend(
        self,
        layer: EncoderLayer,
        x: Tensor,
        batch: AttentionBatch,
        cache: tuple[Tensor, Tensor],
        angles: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        num_tokens = len(x)
        qkv = layer.qkv(x).view(num_tokens, -1, layer.head_dim)
        q, k, v = torch.split(qkv, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
        if angles is not None:
            rotary(q, k, *angles)
        store_kv(k, v, *cache, batch.slot_mapping)
        return paged_attention(q, *cache, batch, self.scale, future=WHOLE).view(num_tokens, -1)


def _normed(x: Tensor, residual: Tensor, norm: LayerNorm) -> Tensor:
    return layer_norm(x, norm.weight, norm.bias, norm.eps, residual=residual)
