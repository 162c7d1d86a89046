"""Where decoders from before Llama, and DBRX, have the parts of which a network is made: a table by model type.

Their layers have no gates but in DBRX's experts, mostly layer norms, and names of their own. Positions are learned,
rotated or a bias of logits by distance. One linear layer may make queries, keys and values (`LayerParts.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from pagewire.kernels.data.layer import Angles
from pagewire.workers.families.encoder_structures import STRUCTURES
from pagewire.workers.families.routers import router_parts
from pagewire.workers.families.structures import (
    LLAMA_LIKE,
    UNKNOWN_ROUTER,
    LayerParts,
    Layers,
    Structure,
    chosen,
    require,
)
from pagewire.workers.module.structure import BERT_LIKE
from pagewire.workers.module.text_base import position_offset
from pagewire.workers.module.weights import Weights


def of_layers(list_name: str, parts: Callable[[Any, Any], LayerParts]) -> Layers:
    """The parts of the layers in a list of a base. parts: of a layer and the base's configuration."""

    def layers(base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
        return [parts(layer, base.config) for layer in chosen(base.get_submodule(list_name), numbers)]

    return layers


def of_gpt2(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of GPT-2 or GPT-BigCode."""
    attention, mlp = layer.attn, layer.mlp
    by_head = not getattr(attention, "multi_query", True)
    return LayerParts(
        (attention.c_attn,),
        attention.c_proj,
        (mlp.c_fc,),
        mlp.c_proj,
        (layer.ln_1, layer.ln_2),
        attention.head_dim,
        index=attention.layer_idx,
        scale=attention.scaling,
        heads=(config.num_attention_heads, getattr(attention, "kv_heads", config.num_attention_heads)),
        blocks=(0, "qkv") if by_head else None,
    )


def of_jais(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of Jais: GPT-2's with gates and a bias by distance."""
    parts, mlp = of_gpt2(layer, config), layer.mlp
    return replace(parts, up=(mlp.c_fc2, mlp.c_fc), gated=True, alibi=1.0)


def of_alibi_llama(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of Baichuan 13B: Llama's with a bias by distance."""
    attention, mlp = layer.self_attn, layer.mlp
    return LayerParts(
        (attention.q_proj, attention.k_proj, attention.v_proj),
        attention.o_proj,
        (mlp.gate_proj, mlp.up_proj),
        mlp.down_proj,
        (layer.input_layernorm, layer.post_attention_layernorm),
        attention.head_dim,
        gated=True,
        index=attention.layer_idx,
        scale=attention.scaling,
        heads=(config.num_attention_heads, config.num_key_value_heads),
        alibi=1.0,
    )


def of_gpt_neo(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of GPT-Neo, whose logits are not scaled."""
    attention, mlp = layer.attn.attention, layer.mlp
    return LayerParts(
        (attention.q_proj, attention.k_proj, attention.v_proj),
        attention.out_proj,
        (mlp.c_fc,),
        mlp.c_proj,
        (layer.ln_1, layer.ln_2),
        attention.head_dim,
        window=config.window_size if attention.attention_type == "local" else None,
        index=attention.layer_id,
        scale=1.0,
    )


def of_gptj(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of GPT-J or CodeGen, whose joined rows lie in four blocks."""
    attention, mlp, count = layer.attn, layer.mlp, config.num_attention_heads
    is_joined = hasattr(attention, "qkv_proj")
    return LayerParts(
        (attention.qkv_proj,) if is_joined else (attention.q_proj, attention.k_proj, attention.v_proj),
        attention.out_proj,
        (mlp.fc_in,),
        mlp.fc_out,
        (layer.ln_1, None),
        attention.head_dim,
        index=attention.layer_idx,
        scale=1 / attention.scale_attn,
        heads=(count, count),
        blocks=(4, "qvk") if is_joined else None,
        parallel=True,
        interleaved=True,
    )


def of_gpt_neox(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of GPT-NeoX."""
    attention, mlp, count = layer.attention, layer.mlp, config.num_attention_heads
    return LayerParts(
        (attention.query_key_value,),
        attention.dense,
        (mlp.dense_h_to_4h,),
        mlp.dense_4h_to_h,
        (layer.input_layernorm, layer.post_attention_layernorm),
        attention.head_size,
        index=attention.layer_idx,
        scale=attention.scaling,
        heads=(count, count),
        blocks=(0, "qkv"),
        parallel=layer.use_parallel_residual,
    )


def of_falcon(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of Falcon: of one key for all queries, for some of them, or for each."""
    attention, mlp = layer.self_attention, layer.mlp
    first = getattr(layer, "ln_attn", None) or layer.input_layernorm
    second = getattr(layer, "ln_mlp", None) or getattr(layer, "post_attention_layernorm", None)
    return LayerParts(
        (attention.query_key_value,),
        attention.dense,
        (mlp.dense_h_to_4h,),
        mlp.dense_4h_to_h,
        (first, second),
        attention.head_dim,
        index=attention.layer_idx,
        scale=attention.inv_norm_factor,
        heads=(attention.num_heads, attention.num_kv_heads),
        blocks=(0, "qkv"),
        parallel=config.parallel_attn or config.new_decoder_architecture,
        turned=not config.alibi,
        alibi=attention.inv_norm_factor if config.alibi else None,
    )


def of_bloom(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of BLOOM."""
    require(not config.apply_residual_connection_post_layernorm, "its sums begin with what norms give")
    attention, mlp = layer.self_attention, layer.mlp
    return LayerParts(
        (attention.query_key_value,),
        attention.dense,
        (mlp.dense_h_to_4h,),
        mlp.dense_4h_to_h,
        (layer.input_layernorm, layer.post_attention_layernorm),
        attention.head_dim,
        index=attention.layer_idx,
        scale=attention.inv_norm_factor,
        heads=(attention.num_heads, attention.num_heads),
        blocks=(0, "qkv"),
        alibi=1.0,
    )


def of_mpt(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of MPT."""
    attention, mlp = layer.attn, layer.ffn
    return LayerParts(
        (attention.Wqkv,),
        attention.out_proj,
        (mlp.up_proj,),
        mlp.down_proj,
        (layer.norm_1, layer.norm_2),
        attention.head_dim,
        index=attention.layer_idx,
        scale=attention.softmax_scale,
        heads=(attention.n_heads, attention.n_heads),
        qkv_limit=attention.clip_qkv or None,
        alibi=1.0,
    )


def of_dbrx(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of DBRX, whose feed-forward half is experts alone."""
    block, half = layer.norm_attn_norm, layer.ffn
    attention, router = block.attn, router_parts(half)
    require(router is not None, UNKNOWN_ROUTER)
    return LayerParts(
        (attention.Wqkv,),
        attention.out_proj,
        (),
        None,
        (block.norm_1, block.norm_2),
        attention.head_dim,
        gated=True,
        index=attention.layer_idx,
        scale=attention.scaling,
        heads=(attention.num_heads, attention.num_key_value_heads),
        qkv_limit=attention.clip_qkv or None,
        mixture=half,
        router=router,
    )


def of_opt(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of OPT or BioGPT."""
    require(getattr(layer, "do_layer_norm_before", True), "its norms come last")
    attention = layer.self_attn
    return LayerParts(
        (attention.q_proj, attention.k_proj, attention.v_proj),
        attention.out_proj,
        (layer.fc1,),
        layer.fc2,
        (layer.self_attn_layer_norm, layer.final_layer_norm),
        attention.head_dim,
        index=attention.layer_idx,
        scale=attention.scaling,
    )


def of_ctrl(layer: Any, config: Any) -> LayerParts:
    """The parts of a layer of CTRL."""
    attention = layer.multi_head_attention
    return LayerParts(
        (attention.Wq, attention.Wk, attention.Wv),
        attention.dense,
        (layer.ffn[0],),
        layer.ffn[2],
        (layer.layernorm1, layer.layernorm2),
        attention.head_dim,
        index=attention.layer_idx,
        scale=attention.scaling,
    )


def of_bert(base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
    """The parts of the layers of BERT or RoBERTa, whose norms come last."""
    indices = range(len(base.encoder.layer)) if numbers is None else numbers
    layers = STRUCTURES["bert"].layers(base, numbers)
    return [replace(parts, index=index) for parts, index in zip(layers, indices, strict=True)]


def bert_rows(base: Any, weights: Weights) -> Tensor:
    """BERT's rows of positions, with that of the type that all tokens have."""
    types = base.embeddings.token_type_embeddings
    weights.fill(types)
    rows = learned("embeddings.position_embeddings", position_offset(base))(base, weights)
    first: Tensor = types.weight.detach()[:1]
    return rows + first


def learned(name: str, first: int = 0) -> Callable[[Any, Weights], Tensor]:
    """The rows of a base's table of positions, from `first` on, which is that of position 0."""

    def rows(base: Any, weights: Weights) -> Tensor:
        table = base.get_submodule(name)
        weights.fill(table)
        found: Tensor = table.weight.detach()[first:]
        return found

    return rows


def of_sines(base: Any, weights: Weights) -> Tensor:
    """CTRL's rows of positions, which no checkpoint has."""
    rows: Tensor | None = weights.read(base, "pos_encoding")
    assert rows is not None, "the module makes them"
    return rows


def gptj_angles(base: Any, weights: Weights) -> Angles:
    """The cosines and sines of all positions, which each layer holds."""
    both = weights.read(base.h[0].attn, "embed_positions")
    assert both is not None, "the module makes them"
    sin, cos = both.chunk(2, 1)
    return cos, sin


def final_opt_norm(base: Any) -> Any:
    """OPT's last norm; there is none in its oldest checkpoints, nor where norms come last."""
    decoder = base.decoder
    require(decoder.project_in is None and decoder.project_out is None, "its embeddings are of another size")
    require(decoder.final_layer_norm is not None, "it has no last norm")
    return decoder.final_layer_norm


GPT2 = replace(
    LLAMA_LIKE,
    layers=of_layers("h", of_gpt2),
    final_norm=lambda base: base.ln_f,
    words="wte",
    rotary=None,
    positions=learned("wpe"),
    activations=("activation_function", "activation", "hidden_act"),
)
GPTJ = replace(GPT2, layers=of_layers("h", of_gptj), positions=None, angles=gptj_angles)
BLOOM = replace(
    GPT2,
    layers=of_layers("h", of_bloom),
    words="word_embeddings",
    norm="word_embeddings_layernorm",
    positions=None,
    activation_name="gelu_pytorch_tanh",
)
OPT = replace(
    GPT2,
    layers=of_layers("decoder.layers", of_opt),
    final_norm=final_opt_norm,
    words="decoder.embed_tokens",
    positions=learned("decoder.embed_positions", 2),
)
BERT = replace(
    GPT2,
    layers=of_bert,
    final_norm=None,
    words="embeddings.word_embeddings",
    norm="embeddings.LayerNorm",
    positions=bert_rows,
)
GPT_STRUCTURES: dict[str, Structure] = {
    **dict.fromkeys(BERT_LIKE, BERT),
    "alibi_llama": replace(LLAMA_LIKE, layers=of_layers("layers", of_alibi_llama), rotary=None),
    "biogpt": replace(
        OPT,
        layers=of_layers("layers", of_opt),
        final_norm=lambda base: base.layer_norm,
        words="embed_tokens",
        positions=learned("embed_positions", 2),
    ),
    "bloom": BLOOM,
    "codegen": GPTJ,
    "ctrl": replace(
        GPT2,
        layers=of_layers("h", of_ctrl),
        final_norm=lambda base: base.layernorm,
        words="w",
        positions=of_sines,
        embedding_scale=lambda base, dtype: base.d_model_size**0.5,
        activation_name="relu",
    ),
    "dbrx": replace(
        LLAMA_LIKE, layers=of_layers("blocks", of_dbrx), final_norm=lambda base: base.norm_f, words="wte"
    ),
    "falcon": replace(BLOOM, layers=of_layers("h", of_falcon), norm=None, rotary="rotary_emb"),
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neo": replace(GPT2, layers=of_layers("h", of_gpt_neo)),
    "gpt_neox": replace(
        LLAMA_LIKE,
        layers=of_layers("layers", of_gpt_neox),
        final_norm=lambda base: base.final_layer_norm,
        words="embed_in",
    ),
    "gptj": GPTJ,
    "jais": replace(
        GPT2,
        layers=of_layers("h", of_jais),
        positions=None,
        embedding_scale=lambda base, dtype: base.config.embeddings_scale,
        activations=(),
        activation_name="silu",
    ),
    "mpt": replace(
        GPT2,
        layers=of_layers("blocks", of_mpt),
        final_norm=lambda base: base.norm_f,
        positions=None,
        activation_name="gelu",
    ),
    "opt": OPT,
}
"""By model type."""
