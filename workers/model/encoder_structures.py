"""Where encoders of transformers have the parts of which a stack is made (`encoder_stack.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.workers.model.weights import Weights

KV_TILE = 256
"""Tokens that attention rounds lengths up to, for which a bias by distance needs a place."""


@dataclass(frozen=True)
class LayerParts:
    """The modules of a layer.

    qkv: of queries, keys and values, or one that makes all of them. norms: of its two halves, before or after them.
    up: what the feed-forward half begins with: one layer, or gate and up. gated: it makes gates, too. window: keys
    to each side that a query sees, its own among them; None: all. kind: of the layer's angles, an argument of the
    rotary module.
    """

    qkv: Sequence[Any]
    out: Any
    up: Sequence[Any]
    down: Any
    norms: tuple[Any, Any]
    head_dim: int
    gated: bool = False
    window: int | None = None
    kind: str | None = None


Layers = Callable[[Any], Iterable[LayerParts]]
"""The parts of a base's layers."""


@dataclass(frozen=True)
class Structure:
    """Where an encoder has what a stack is made of.

    final_norm: behind the last layer, of a base whose layers begin with their norms; None: theirs come last.
    words: the name of the tokens' table in the module of embeddings; norm: that of its norm, None if it has none.
    relative_bias: of a base and its weights, float32 [Hq, 2 R]; None: attention has none.
    """

    layers: Layers
    final_norm: Callable[[Any], Any] | None = None
    words: str = "word_embeddings"
    norm: str | None = "LayerNorm"
    relative_bias: Callable[[Any, Weights], Tensor] | None = None


def bert_like(norms_of: Callable[[Any], tuple[Any, Any]]) -> Layers:
    """The parts of layers that are BERT's but for where their norms are."""

    def parts(layer: Any) -> LayerParts:
        attention = layer.attention.self
        return LayerParts(
            (attention.query, attention.key, attention.value),
            layer.attention.output.dense,
            (layer.intermediate.dense,),
            layer.output.dense,
            norms_of(layer),
            attention.attention_head_size,
        )

    return lambda base: map(parts, base.encoder.layer)


def of_distilbert(base: Any) -> Iterable[LayerParts]:
    """The parts of DistilBERT's layers."""
    for layer in base.transformer.layer:
        attention = layer.attention
        yield LayerParts(
            (attention.q_lin, attention.k_lin, attention.v_lin),
            attention.out_lin,
            (layer.ffn.lin1,),
            layer.ffn.lin2,
            (layer.sa_layer_norm, layer.output_layer_norm),
            attention.attention_head_size,
        )


def of_mpnet(base: Any) -> Iterable[LayerParts]:
    """The parts of MPNet's layers."""
    for layer in base.encoder.layer:
        attention = layer.attention.attn
        yield LayerParts(
            (attention.q, attention.k, attention.v),
            attention.o,
            (layer.intermediate.dense,),
            layer.output.dense,
            (layer.attention.LayerNorm, layer.output.LayerNorm),
            attention.attention_head_size,
        )


def of_rotary(base: Any) -> Iterable[LayerParts]:
    """The parts of NomicBERT's, GTE's and Jina's layers; Jina's have no gates."""
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        gated = hasattr(mlp, "gate_proj")
        yield LayerParts(
            (attention.q_proj, attention.k_proj, attention.v_proj),
            attention.o_proj,
            (mlp.gate_proj, mlp.up_proj) if gated else (mlp.fc1,),
            mlp.down_proj if gated else mlp.fc2,
            (layer.post_attention_layernorm, layer.post_mlp_layernorm),
            attention.head_dim,
            gated,
        )


def of_modernbert(base: Any) -> Iterable[LayerParts]:
    """The parts of ModernBERT's layers."""
    for layer in base.layers:
        yield LayerParts(
            (layer.attn.Wqkv,),
            layer.attn.Wo,
            (layer.mlp.Wi,),
            layer.mlp.Wo,
            (layer.attn_norm, layer.mlp_norm),
            layer.attn.head_dim,
            gated=True,
            window=layer.attn.sliding_window,
            kind=layer.attention_type,
        )


def mpnet_bias(base: Any, weights: Weights) -> Tensor:
    """MPNet's bias [Hq, 2 R] of distances from -R on, which is the same in all layers."""
    radius = -(-base.config.max_position_embeddings // KV_TILE) * KV_TILE
    table: nn.Embedding = base.encoder.relative_attention_bias
    weights.fill(table)
    buckets: Tensor = base.encoder.relative_position_bucket(torch.arange(-radius, radius))
    return table.weight.detach()[buckets].T.float().contiguous()


STRUCTURES: dict[str, Structure] = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "electra", "ernie"),
        Structure(bert_like(lambda layer: (layer.attention.output.LayerNorm, layer.output.LayerNorm))),
    ),
    "roberta-prelayernorm": Structure(
        bert_like(lambda layer: (layer.attention.LayerNorm, layer.intermediate.LayerNorm)),
        final_norm=lambda base: base.LayerNorm,
    ),
    "xlm-roberta-xl": Structure(
        bert_like(lambda layer: (layer.attention.self_attn_layer_norm, layer.LayerNorm)),
        final_norm=lambda base: base.encoder.LayerNorm,
        norm=None,
    ),
    "megatron-bert": Structure(
        bert_like(lambda layer: (layer.attention.ln, layer.ln)),
        final_norm=lambda base: base.encoder.ln,
        norm=None,
    ),
    "distilbert": Structure(of_distilbert),
    **dict.fromkeys(("nomic_bert", "gte", "jina_embeddings_v3"), Structure(of_rotary)),
    "modernbert": Structure(
        of_modernbert, final_norm=lambda base: base.final_norm, words="tok_embeddings", norm="norm"
    ),
    "mpnet": Structure(of_mpnet, relative_bias=mpnet_bias),
}
"""By model type."""
