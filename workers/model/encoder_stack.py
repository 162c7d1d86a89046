"""Builds the fast stack of encoders like BERT from a transformers module.

A stack is built if the module has one of the known structures (`encoder_structures.py`), and used only if it then
computes the same hidden states (`pooling_loading.py`). Other encoders keep their own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.layer import Activation, Layer, LayerNorm
from pagewire.kernels.linear import Linear
from pagewire.kernels.ops import layer_norm
from pagewire.kernels.paging import LogitTerms
from pagewire.kernels.stack import Stack
from pagewire.workers.model.attention import KVShape, current_step
from pagewire.workers.model.encoder_structures import STRUCTURES, LayerParts, Structure
from pagewire.workers.model.transforms import RotaryTable, embedding, pack_joined
from pagewire.workers.model.weights import Weights

ACTIVATION_NAMES = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}
TABLES = ("position_embeddings", "token_type_embeddings")


class _OtherStructureError(Exception):
    pass


def _require(condition: bool) -> None:
    if not condition:
        raise _OtherStructureError


def build_encoder_stack(base: Any, weights: Weights, device: torch.device) -> EncoderStack | None:
    """The stack of `base`, with its weights packed; None if `base` has another structure."""
    if (structure := STRUCTURES.get(base.config.model_type)) is None:
        return None
    try:
        _require(getattr(base, "embeddings_project", None) is None)  # Electra's, if its embeddings are small
        rotary = getattr(base, "rotary_emb", None)
        _require(rotary is None or isinstance(rotary, RotaryTable))
        parts = list(structure.layers(base))
        _require(len(parts) > 0)
        embeddings = EncoderEmbeddings.of(base.embeddings, structure, weights, device)
        kinds = list(dict.fromkeys(part.kind for part in parts)) if rotary is not None else []
        stack = _stack(base, structure, parts, kinds, weights, device)
    except (_OtherStructureError, AttributeError):
        return None
    if rotary is not None:
        rotary.to(device)
    whole = EncoderStack(embeddings, stack, rotary, kinds, getattr(base, "pooler", None))
    whole.config, whole.base_model_prefix = base.config, base.base_model_prefix
    return whole


def _stack(
    base: Any,
    structure: Structure,
    parts: Sequence[LayerParts],
    kinds: Sequence[str | None],
    weights: Weights,
    device: torch.device,
) -> Stack:
    """The layers of a base, of these parts. kinds: of angles, in the order of their numbers."""
    activation = activation_of(base.config)
    bias = None if structure.relative_bias is None else structure.relative_bias(base, weights).to(device)
    norms = [norm for part in parts for norm in part.norms]
    first = None
    if structure.final_norm is not None:
        first, *norms = *norms, structure.final_norm(base)
    layers = []
    for part, pair in zip(parts, zip(norms[::2], norms[1::2], strict=True), strict=True):
        angles = kinds.index(part.kind) if kinds else None
        layers.append(_packed(part, pair, activation, angles, bias, weights, device))
    # ModernBERT's first layer has no norm of its own: its input is normed already.
    input_norm = None if first is None or isinstance(first, nn.Identity) else _norm(first, weights, device)
    return Stack(input_norm, layers, norm_first=structure.final_norm is not None)


def activation_of(config: Any) -> Activation:
    """The activation that a configuration names."""
    names = ("hidden_act", "activation", "hidden_activation")
    name = next((found for name in names if (found := getattr(config, name, None)) is not None), None)
    _require(name in ACTIVATION_NAMES)
    return ACTIVATION_NAMES[str(name)]


def _packed(
    parts: LayerParts,
    norms: tuple[Any, Any],
    activation: Activation,
    angles: int | None,
    bias: Tensor | None,
    weights: Weights,
    device: torch.device,
) -> Layer:
    """A layer of the stack, with joined and packed linear layers. norms: of the sums in it."""
    heads = [weights.num_rows(linear) // parts.head_dim for linear in parts.qkv]
    if len(heads) == 1:
        heads = [heads[0] // 3] * 3
    _require(heads[1] == heads[2])
    return Layer(
        qkv=_joined(parts.qkv, weights, device),
        out=_joined([parts.out], weights, device),
        attention_norm=_norm(norms[0], weights, device),
        up=_joined(parts.up, weights, device),
        down=_joined([parts.down], weights, device),
        output_norm=_norm(norms[1], weights, device),
        activation=activation,
        gated=parts.gated,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=parts.head_dim,
        scale=parts.head_dim**-0.5,
        angles=angles,
        terms=LogitTerms.two_sided(parts.window, bias),
    )


def _joined(linears: Sequence[Any], weights: Weights, device: torch.device) -> Linear:
    _require(all(type(linear) is nn.Linear for linear in linears))
    _require(len({linear.bias is None for linear in linears}) == 1)
    return pack_joined(linears, weights, device)


def _norm(module: Any, weights: Weights, device: torch.device) -> LayerNorm:
    _require(type(module) is nn.LayerNorm)
    weights.fill(module)
    bias = None if module.bias is None else module.bias.detach().to(device)
    return LayerNorm(module.weight.detach().to(device), bias, module.eps)


class EncoderEmbeddings(nn.Module):
    """The sum of a token's embeddings: of the word, and where there are any, of its type and position.

    norm: of the sum; None: it is not normed.
    """

    def __init__(
        self,
        norm: LayerNorm | None,
        word_embeddings: nn.Module,
        position_embeddings: nn.Module | None,
        token_type_embeddings: nn.Module | None,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.word_embeddings = word_embeddings
        self.position_embeddings, self.token_type_embeddings = position_embeddings, token_type_embeddings

    @classmethod
    def of(
        cls, embeddings: Any, structure: Structure, weights: Weights, device: torch.device
    ) -> EncoderEmbeddings:
        """Those of a transformers module.

        Raises:
            AttributeError: it has no words or no norm.
        """
        known = {*TABLES, structure.words, structure.norm, "dropout", "drop"}
        _require({name for name, _ in embeddings.named_children()} <= known)
        norm = None if structure.norm is None else _norm(getattr(embeddings, structure.norm), weights, device)
        words: Any = embedding(getattr(embeddings, structure.words), weights, device)
        tables = (getattr(embeddings, name, None) for name in TABLES)
        found = (x if x is None else embedding(x, weights, device) for x in tables)
        return cls(norm, words, *found).to(device)

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """ids, positions and types int64 [T] to states [T, H]; types: None for all 0."""
        x = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(torch.zeros_like(ids[:1]) if types is None else types)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        return x if self.norm is None else layer_norm(x, self.norm.weight, self.norm.bias, self.norm.eps)


class EncoderStack(nn.Module):
    """Replaces the base of an encoder: embeddings and layers.

    config, base_model_prefix, pooler: the base's own. kinds: of angles, as the rotary module is asked for them; the
    layers number them. angles: cosines and sines by position, of each kind; None until the first step.
    """

    config: Any = None
    base_model_prefix = "base"

    def __init__(
        self,
        embeddings: EncoderEmbeddings,
        stack: Stack,
        rotary: RotaryTable | None,
        kinds: Sequence[str | None] = (),
        pooler: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embeddings, self.stack, self.pooler = embeddings, stack, pooler
        self.rotary, self._kinds = rotary, kinds
        self.angles: list[tuple[Tensor, Tensor]] | None = None
        first = stack.layers[0]
        self.kv_shape = KVShape(first.num_kv_heads, first.head_dim, first.head_dim, first.qkv.dtype)

    def get_input_embeddings(self) -> nn.Module:
        """The module that looks tokens up, under transformers' name."""
        return self.embeddings.word_embeddings

    @property
    def num_bytes(self) -> int:
        """Bytes of the layers' weights, and of the norms before them."""
        norm = self.embeddings.norm
        return self.stack.num_bytes + (0 if norm is None else norm.num_bytes)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor]:
        """Tokens int64 [1, T] of a step to hidden states [1, T, H]."""
        step, positions = current_step(), position_ids[0]
        types = None if token_type_ids is None else token_type_ids[0]
        x = self.embeddings(input_ids[0], positions, types)
        if self.angles is None:
            self.angles = [self._tables(x, kind) for kind in self._kinds]
        angles = [
            (cos.index_select(0, positions), sin.index_select(0, positions)) for cos, sin in self.angles
        ]
        caches = [step.cache(0, self.kv_shape, None)] * len(self.stack.layers)
        return (self.stack(x, step.batch, caches, angles)[None],)

    def _tables(self, x: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [P, rot_dim] of all positions for states like x [T, H]."""
        assert self.rotary is not None
        cos, sin = self.rotary.table(x[None], *([] if kind is None else [kind]))
        return cos[0], sin[0]
