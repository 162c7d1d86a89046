"""Where encoders of transformers have the parts of which a network is made: a table by model type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.workers.families.structures import LayerParts, Layers, Structure, chosen, require
from pagewire.workers.module.structure import BERT_LIKE
from pagewire.workers.module.weights import Weights

KV_TILE = 256
"""Tokens that attention rounds lengths up to, for which a bias by distance needs a place."""
TABLES = ("position_embeddings", "token_type_embeddings")
"""The names of an encoder's tables beside that of its words."""


def bert_like(norms_of: Callable[[Any], tuple[Any, Any]]) -> Layers:
    """The parts of layers that are BERT's but for where their norms are."""

    def parts(base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
        for layer in chosen(base.encoder.layer, numbers):
            attention = layer.attention.self
            yield LayerParts(
                (attention.query, attention.key, attention.value),
                layer.attention.output.dense,
                (layer.intermediate.dense,),
                layer.output.dense,
                norms_of(layer),
                attention.attention_head_size,
            )

    return parts


def of_distilbert(base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
    """The parts of DistilBERT's layers."""
    for layer in chosen(base.transformer.layer, numbers):
        attention = layer.attention
        yield LayerParts(
            (attention.q_lin, attention.k_lin, attention.v_lin),
            attention.out_lin,
            (layer.ffn.lin1,),
            layer.ffn.lin2,
            (layer.sa_layer_norm, layer.output_layer_norm),
            attention.attention_head_size,
        )


def of_mpnet(base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
    """The parts of MPNet's layers."""
    for layer in chosen(base.encoder.layer, numbers):
        attention = layer.attention.attn
        yield LayerParts(
            (attention.q, attention.k, attention.v),
            attention.o,
            (layer.intermediate.dense,),
            layer.output.dense,
            (layer.attention.LayerNorm, layer.output.LayerNorm),
            attention.attention_head_size,
        )


def of_rotary(base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
    """The parts of NomicBERT's, GTE's and Jina's layers; Jina's have no gates."""
    for layer in chosen(base.layers, numbers):
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


def of_modernbert(base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
    """The parts of ModernBERT's layers."""
    for layer in chosen(base.layers, numbers):
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
        BERT_LIKE,
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
"""By model type, of encoders."""


def encoder_structure(base: Any) -> Structure:
    """The structure of an encoder's base.

    Raises:
        OtherStructureError: none is known.
    """
    model_type = base.config.model_type
    require(model_type in STRUCTURES, f"the parts of an encoder of type {model_type!r} are not described")
    return STRUCTURES[model_type]
