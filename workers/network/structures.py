"""Where transformers' base models have the parts of which a network is made (`build.py`): a table by model type.

A base whose structure is not here, or that has other parts than its structure says, keeps its own forward. Models
of the same structure but with other arithmetic do so too: the proof (`proof.py`) finds them, or `structure.py`
names them before anything is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.data.layer import Activation, LayerNorm, Norm
from pagewire.workers.module.structure import (
    ATTENTION,
    DEFAULT_ACTIVATION,
    HEAD_NORMS,
    MLP,
    NORMS,
    OTHER_ARITHMETIC,
    SHARED,
    SPARSE,
    SPARSE_MODELS,
)
from pagewire.workers.module.transforms import norm_kernel
from pagewire.workers.module.weights import Weights

KV_TILE = 256
"""Tokens that attention rounds lengths up to, for which a bias by distance needs a place."""
TABLES = ("position_embeddings", "token_type_embeddings")
"""The names of an encoder's tables beside that of its words."""
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
WINDOW_EVERYWHERE = {"mistral", "mixtral"}
"""Model types whose every layer uses config.sliding_window."""
SWIGLU = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
"""The activations of decoders' gates by transformers' names."""
ACTIVATIONS = {**SWIGLU, "gelu": Activation.GELU, "gelu_new": Activation.GELU_TANH}


class OtherStructureError(Exception):
    """A module has other parts than its structure says, so it is no network."""


def require(condition: bool) -> None:
    """Raise `OtherStructureError` unless the condition holds."""
    if not condition:
        raise OtherStructureError


def children(module: nn.Module) -> set[str]:
    """The names of a module's parts."""
    return {name for name, _ in module.named_children()}


@dataclass(frozen=True)
class LayerParts:
    """The modules of a layer.

    qkv: of queries, keys and values, or one that makes all of them. norms: of its two halves, before or after them.
    up: what the feed-forward half begins with: one layer, or gate and up. gated: it makes gates, too.
    window: keys that a query sees, its own among them, in an encoder to each side; None: all.
    kind: of the layer's angles, an argument of the rotary module. index: of its KV cache.
    scale: of dot products; None: 1 / sqrt(head_dim). head_norms: of query and key heads.
    mixture: a module with `gate`, `experts` and maybe a shared expert, of a layer that has experts. Then `up` and
    `down` are the shared expert's, or there are none.
    mixer, feed_forward: modules that run as they are, in place of attention and of the feed-forward half.
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
    index: int = 0
    scale: float | None = None
    head_norms: tuple[Any, Any] | None = None
    mixture: Any = None
    mixer: Any = None
    feed_forward: Any = None


Layers = Callable[[Any, Iterable[int] | None], Iterable[LayerParts]]
"""The parts of a base's layers of these numbers; None: of all."""
NormOf = Callable[[nn.Module, Weights, torch.device], Norm | LayerNorm]
"""The norm that a module computes, with its weights on a device."""


def layer_norm_of(module: Any, weights: Weights, device: torch.device) -> LayerNorm:
    """A layer norm.

    Raises:
        OtherStructureError: the module is none.
    """
    require(type(module) is nn.LayerNorm)
    weights.fill(module)
    bias = None if module.bias is None else module.bias.detach().to(device)
    return LayerNorm(module.weight.detach().to(device), bias, module.eps)


def rms_norm_of(module: nn.Module, weights: Weights, device: torch.device) -> Norm:
    """An RMS norm, as a trial of the module shows.

    Raises:
        OtherStructureError: the module is none.
    """
    weights.fill(module)
    norm = norm_kernel(module)
    if norm is None:
        raise OtherStructureError
    return Norm(norm.weight.to(device), norm.eps, norm.offset)


@dataclass(frozen=True)
class Structure:
    """Where a base has what a network is made of.

    final_norm: behind the last layer, of a base whose layers begin with their norms; None: theirs come last.
    words: the name of the tokens' table, in a causal base itself or in the module of an encoder's embeddings.
    norm: the name of the norm of their sum; None: it is not normed. relative_bias: of a base and its weights,
    float32 [Hq, 2 R]; None: attention has none. causal: tokens attend to none behind them.
    rotary: the name of the module that makes angles, if the base has one; None: there are none.
    """

    layers: Layers
    final_norm: Callable[[Any], Any] | None = None
    words: str = "word_embeddings"
    norm: str | None = "LayerNorm"
    relative_bias: Callable[[Any, Weights], Tensor] | None = None
    norm_of: NormOf = layer_norm_of
    activations: tuple[str, ...] = ("hidden_act", "activation", "hidden_activation")
    causal: bool = False
    rotary: str | None = "rotary_emb"

    def activation(self, config: Any) -> Activation:
        """The activation that a configuration names.

        Raises:
            OtherStructureError: the kernels have none like it, or the structure is not known with it.
        """
        names = (getattr(config, name, None) for name in self.activations)
        name = next((name for name in names if name is not None), DEFAULT_ACTIVATION if self.causal else None)
        activations = SWIGLU if self.causal else ACTIVATIONS
        require(name in activations)
        return activations[str(name)]


def chosen(layers: Iterable[Any], numbers: Iterable[int] | None) -> list[Any]:
    """The layers of these numbers; None: all."""
    own = list(layers)
    return own if numbers is None else [own[number] for number in numbers]


def of_decoder(base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
    """The parts of a Llama-like decoder's layers."""
    config = base.config
    for layer in chosen(base.layers, numbers):
        if type(layer) is nn.Identity:  # see `without_picture_layers`
            continue
        attention, mlp = layer.self_attn, layer.mlp
        require(children(layer) == {"self_attn", "mlp"} | NORMS)
        require(children(attention) in (ATTENTION, ATTENTION | HEAD_NORMS))
        require(attention.q_proj.out_features == attention.o_proj.in_features)  # no gates among the queries
        has_experts = config.model_type in SPARSE_MODELS and children(mlp) >= SPARSE
        mixture = mlp if has_experts else None
        if has_experts:
            require(children(mlp) in (SPARSE, SPARSE | SHARED))
            mlp = getattr(mlp, "shared_expert", None)
        else:
            require(children(mlp) - {"act_fn"} == MLP)
        has_head_norms = children(attention) >= HEAD_NORMS
        yield LayerParts(
            qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
            out=attention.o_proj,
            up=() if mlp is None else (mlp.gate_proj, mlp.up_proj),
            down=None if mlp is None else mlp.down_proj,
            norms=(layer.input_layernorm, layer.post_attention_layernorm),
            head_dim=attention.head_dim,
            gated=True,
            window=attention_window(attention, config),
            index=attention.layer_idx,
            scale=float(attention.scaling),
            head_norms=(attention.q_norm, attention.k_norm) if has_head_norms else None,
            mixture=mixture,
        )


def attention_window(attention: Any, config: Any) -> int | None:
    """Keys that a query of a decoder's layer attends to; None for all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    window: int | None = getattr(config, "sliding_window", None)
    if window is None or config.model_type in WINDOW_EVERYWHERE:
        return window
    kinds = getattr(config, "layer_types", None)
    require(kinds is not None and kinds[attention.layer_idx] == "full_attention")
    return None


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
"""By model type, of encoders."""
LLAMA_LIKE = Structure(
    of_decoder,
    final_norm=lambda base: base.norm,
    words="embed_tokens",
    norm=None,
    norm_of=rms_norm_of,
    activations=("hidden_act", "hidden_activation"),
    causal=True,
)


def structure_of(base: Any, *, encodes: bool) -> Structure:
    """The structure of a base; encodes: its tokens attend to later ones, too.

    Raises:
        OtherStructureError: none is known.
    """
    model_type = base.config.model_type
    if encodes:
        require(model_type in STRUCTURES)
        return STRUCTURES[model_type]
    require(children(base) == DECODER and type(base.embed_tokens) in (nn.Embedding, nn.Identity))
    require(model_type not in OTHER_ARITHMETIC)
    return LLAMA_LIKE
