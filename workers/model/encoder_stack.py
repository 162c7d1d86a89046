"""Builds the fast stack of encoders like BERT from a transformers module.

A stack is built if the module has one of the known structures, and used only if it then computes the same hidden
states (`pooling_loading.py`). Other encoders keep their own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.encoder import EncoderLayer, LayerNorm
from pagewire.kernels.encoder import EncoderStack as Stack
from pagewire.kernels.layer import Activation
from pagewire.kernels.layers import layer_norm
from pagewire.kernels.linear import Linear
from pagewire.workers.model.attention import KVShape, current_step
from pagewire.workers.model.transforms import RotaryTable, embedding, pack_joined
from pagewire.workers.model.weights import Weights

ACTIVATION_NAMES = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}
TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")


class _OtherStructureError(Exception):
    pass


def _require(condition: bool) -> None:
    if not condition:
        raise _OtherStructureError


@dataclass(frozen=True)
class LayerParts:
    """The modules of a layer. up: what takes the normed sum: one layer, or gate and up."""

    qkv: Sequence[Any]
    out: Any
    attention_norm: Any
    up: Sequence[Any]
    down: Any
    output_norm: Any
    head_dim: int
    scale: float


def of_bert(layer: Any) -> LayerParts:
    """BERT's, RoBERTa's, XLM-RoBERTa's and CamemBERT's layer."""
    attention = layer.attention.self
    return LayerParts(
        (attention.query, attention.key, attention.value),
        layer.attention.output.dense,
        layer.attention.output.LayerNorm,
        (layer.intermediate.dense,),
        layer.output.dense,
        layer.output.LayerNorm,
        attention.attention_head_size,
        attention.scaling,
    )


def of_distilbert(layer: Any) -> LayerParts:
    """DistilBERT's layer."""
    attention = layer.attention
    return LayerParts(
        (attention.q_lin, attention.k_lin, attention.v_lin),
        attention.out_lin,
        layer.sa_layer_norm,
        (layer.ffn.lin1,),
        layer.ffn.lin2,
        layer.output_layer_norm,
        attention.attention_head_size,
        attention.scaling,
    )


def of_gated(layer: Any) -> LayerParts:
    """NomicBERT's and GTE's layer."""
    attention = layer.self_attn
    return LayerParts(
        (attention.q_proj, attention.k_proj, attention.v_proj),
        attention.o_proj,
        layer.post_attention_layernorm,
        (layer.mlp.gate_proj, layer.mlp.up_proj),
        layer.mlp.down_proj,
        layer.post_mlp_layernorm,
        attention.head_dim,
        attention.scaling,
    )


STRUCTURES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], LayerParts]]] = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert"), (lambda base: base.encoder.layer, of_bert)
    ),
    "distilbert": (lambda base: base.transformer.layer, of_distilbert),
    **dict.fromkeys(("nomic_bert", "gte"), (lambda base: base.layers, of_gated)),
}
"""By model type: the layers of a base, and the parts of one."""


def build_encoder_stack(base: Any, weights: Weights, device: torch.device) -> EncoderStack | None:
    """The stack of `base`, with its weights packed; None if `base` has another structure."""
    if base.config.model_type not in STRUCTURES:
        return None
    layers_of, parts_of = STRUCTURES[base.config.model_type]
    try:
        parts = [parts_of(layer) for layer in layers_of(base)]
        _require(len(parts) > 0 and len({part.scale for part in parts}) == 1)
        name = getattr(base.config, "hidden_act", None) or getattr(base.config, "activation", None)
        _require(name in ACTIVATION_NAMES)
        rotary = getattr(base, "rotary_emb", None)
        _require(rotary is None or isinstance(rotary, RotaryTable))
        embeddings = EncoderEmbeddings.of(base.embeddings, weights, device)
        layers = [_packed(part, ACTIVATION_NAMES[str(name)], weights, device) for part in parts]
    except (_OtherStructureError, AttributeError):
        return None
    pooler = getattr(base, "pooler", None)
    stack = EncoderStack(embeddings, Stack(layers, parts[0].scale), rotary, pooler)
    stack.config, stack.base_model_prefix = base.config, base.base_model_prefix
    return stack


def _packed(
    parts: LayerParts, activation: Activation, weights: Weights, device: torch.device
) -> EncoderLayer:
    """A layer of the stack, with joined and packed linear layers."""
    heads = [weights.num_rows(linear) // parts.head_dim for linear in parts.qkv]
    _require(heads[1] == heads[2])
    return EncoderLayer(
        qkv=_joined(parts.qkv, weights, device),
        out=_joined([parts.out], weights, device),
        attention_norm=_norm(parts.attention_norm, weights),
        up=_joined(parts.up, weights, device),
        down=_joined([parts.down], weights, device),
        output_norm=_norm(parts.output_norm, weights),
        activation=activation,
        gated=len(parts.up) == 2,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=parts.head_dim,
    )


def _joined(linears: Sequence[Any], weights: Weights, device: torch.device) -> Linear:
    _require(all(type(linear) is nn.Linear for linear in linears))
    _require(len({linear.bias is None for linear in linears}) == 1)
    return pack_joined(linears, weights, device)


def _norm(module: Any, weights: Weights) -> LayerNorm:
    _require(type(module) is nn.LayerNorm)
    weights.fill(module)
    return LayerNorm(
        module.weight.detach(), None if module.bias is None else module.bias.detach(), module.eps
    )


class EncoderEmbeddings(nn.Module):
    """The sum of a token's embeddings: of the word, and where there are any, of its type and position; normed."""

    def __init__(
        self,
        norm: LayerNorm,
        word_embeddings: nn.Module,
        position_embeddings: nn.Module | None,
        token_type_embeddings: nn.Module | None,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.word_embeddings = word_embeddings
        self.position_embeddings, self.token_type_embeddings = position_embeddings, token_type_embeddings

    @classmethod
    def of(cls, embeddings: Any, weights: Weights, device: torch.device) -> EncoderEmbeddings:
        """Those of a transformers module.

        Raises:
            AttributeError: it has no words or no norm.
        """
        tables = {name: getattr(embeddings, name, None) for name in TABLES}
        _require({name for name, _ in embeddings.named_children()} <= {*TABLES, "LayerNorm", "dropout"})
        made: dict[str, Any] = {
            name: None if table is None else embedding(table, weights, device)
            for name, table in tables.items()
        }
        return cls(_norm(embeddings.LayerNorm, weights), **made)

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """ids, positions and types int64 [T] to states [T, H]; types: None for all 0."""
        x = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(torch.zeros(1, dtype=torch.int64) if types is None else types)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        return layer_norm(x, self.norm.weight, self.norm.bias, self.norm.eps)


class EncoderStack(nn.Module):
    """Replaces the base of an encoder: embeddings and layers.

    config, base_model_prefix, pooler: the base's own. angles: cosines and sines by position; None until the first
    step, and where there is no rotary embedding.
    """

    config: Any = None
    base_model_prefix = "base"

    def __init__(
        self,
        embeddings: EncoderEmbeddings,
        stack: Stack,
        rotary: RotaryTable | None,
        pooler: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embeddings, self.stack, self.rotary, self.pooler = embeddings, stack, rotary, pooler
        self.angles: list[Tensor] | None = None
        first = stack.layers[0]
        self.kv_shape = KVShape(first.num_kv_heads, first.head_dim, first.head_dim, first.qkv.dtype)

    def get_input_embeddings(self) -> nn.Module:
        """The module that looks tokens up, under transformers' name."""
        return self.embeddings.word_embeddings

    @property
    def num_bytes(self) -> int:
        """Bytes of the layers' weights, and of the embeddings' norm."""
        norm = self.embeddings.norm
        vectors = (norm.weight, norm.bias)
        return sum(layer.num_bytes for layer in self.stack.layers) + sum(
            vector.nbytes for vector in vectors if vector is not None
        )

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor]:
        """Tokens int64 [1, T] of a step to hidden states [1, T, H]."""
        step, positions = current_step(), position_ids[0]
        types = None if token_type_ids is None else token_type_ids[0]
        x = self.embeddings(input_ids[0], positions, types)
        if self.angles is None and self.rotary is not None:
            self.angles = [table[0] for table in self.rotary.table(x[None])]
        angles = None
        if self.angles is not None:
            cos, sin = (table.index_select(0, positions) for table in self.angles)
            angles = cos, sin
        return (self.stack(x, step.batch, step.cache(0, self.kv_shape, None), angles)[None],)
