"""Builds the fast decoder stack of Llama-like models from a transformers module.

A stack is built if the module has the common structure, and used only if it then computes the same logits
(`proof.py`). Models of the same structure but with other arithmetic keep their own forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.layer import Activation, Layer, Mixture, Norm
from pagewire.kernels.linear import Linear
from pagewire.kernels.paging import LogitTerms
from pagewire.kernels.reduced import Reduced, Sum
from pagewire.kernels.stack import Stack
from pagewire.workers.model.attention import KVShape, StepContext
from pagewire.workers.model.experts import grouped_experts, router_of
from pagewire.workers.model.stages import Stage
from pagewire.workers.model.structure import (
    ATTENTION,
    HEAD_NORMS,
    MLP,
    NORMS,
    OTHER_ARITHMETIC,
    SHARED,
    SPARSE,
    SPARSE_MODELS,
)
from pagewire.workers.model.transforms import RotaryTable, embedding, norm_kernel, pack_joined
from pagewire.workers.model.weights import Weights

BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp"} | NORMS
WINDOW_EVERYWHERE = {"mistral", "mixtral"}  # model types whose every layer uses config.sliding_window
ACTIVATION_NAMES = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def build_stack(
    base: Any, weights: Weights, device: torch.device, stage: Stage | None = None
) -> DecoderStack | None:
    """The stack of `base`, with its layers on `device`; None if `base` has another structure.

    stage: of a pipeline, whose layers alone are packed.
    """
    try:
        return DecoderStack(base, weights, device, stage)
    except (_OtherStructureError, AttributeError):
        return None


class _OtherStructureError(Exception):
    pass


def _require(condition: bool) -> None:
    if not condition:
        raise _OtherStructureError


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _norm(module: nn.Module, weights: Weights, device: torch.device) -> Norm:
    weights.fill(module)
    norm = norm_kernel(module)
    if norm is None:
        raise _OtherStructureError
    return Norm(norm.weight.to(device), norm.eps, norm.offset)


class DecoderStack(nn.Module):
    """Replaces the base of a causal model: embedding, decoder layers and final norm.

    A stage of a pipeline has its own layers only, and what is next to them of embedding and final norm. Between
    stages goes what is added up in all layers; each norms it for its first layer.
    """

    embed_tokens: nn.Module | None

    def __init__(self, base: Any, weights: Weights, device: torch.device, stage: Stage | None = None) -> None:
        super().__init__()
        _require(_children(base) == BASE and type(base.embed_tokens) is nn.Embedding)
        _require(base.config.model_type not in OTHER_ARITHMETIC)
        _require(isinstance(base.rotary_emb, RotaryTable))
        self.rotary = base.rotary_emb
        is_first, self.is_last = (True, True) if stage is None else (stage.is_first, stage.is_last)
        self.embed_tokens: nn.Module | None = (
            embedding(base.embed_tokens, weights, device) if is_first else None
        )
        self._angles: list[Tensor] | None = None  # cosines and sines by position, from the first step on
        own = base.layers if stage is None else [base.layers[index] for index in stage.layers]
        own = [layer for layer in own if type(layer) is not nn.Identity]  # see `without_picture_layers`
        self.stack_layers = [StackLayer(layer, base.config, weights) for layer in own]
        # Experts on a GPU are called one by one, between which the host waits: that cannot be recorded as a graph.
        _require(device.type == "cpu" or not any(layer.is_sparse for layer in self.stack_layers))
        modules = (*(layer.input_layernorm for layer in own), *([base.norm] if self.is_last else []))
        norms = [_norm(norm, weights, device) for norm in modules]
        if not self.is_last:
            norms.append(norms[-1])  # one must be there; what it makes is dropped
        layers = [
            layer.packed(norm, weights, device)
            for layer, norm in zip(self.stack_layers, norms[1:], strict=True)
        ]
        self.stack = Stack(norms[0], layers)

    def get_input_embeddings(self) -> nn.Module | None:
        """The module that looks tokens up, under transformers' name; None in a stage behind the first."""
        return self.embed_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of the layers' weights."""
        return self.stack.num_bytes

    def forward(self, input_ids: Tensor, step: StepContext, received: Tensor | None = None) -> Tensor:
        """Tokens int64 [T] of a step to hidden states [T, H].

        received: of the stage before, in place of those of the embedding; overwritten.
        """
        residual = received
        if residual is None:
            assert self.embed_tokens is not None, "a stage that has no embedding is after another one"
            residual = self.embed_tokens(input_ids)
        if self._angles is None:
            self._angles = [table[0] for table in self.rotary.table(residual[None])]
        cos, sin = (table.index_select(0, step.positions) for table in self._angles)
        caches = [step.cache(layer.index, layer.kv_shape, layer.window) for layer in self.stack_layers]
        normed = self.stack(residual, step.batch, caches, [(cos, sin)], step.adapters)
        return normed if self.is_last else residual


class StackLayer:
    """One decoder layer of the original module, checked to have the structure of a stack's layer."""

    def __init__(self, layer: Any, config: Any, weights: Weights) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        _require(_children(layer) == LAYER)
        _require(_children(attention) in (ATTENTION, ATTENTION | HEAD_NORMS))
        self.is_sparse = config.model_type in SPARSE_MODELS and _children(mlp) >= SPARSE
        if self.is_sparse:
            _require(_children(mlp) in (SPARSE, SPARSE | SHARED))
        else:
            _require(_children(mlp) - {"act_fn"} == MLP)
        self.layer = layer
        self.activation = str(
            getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
        )
        _require(self.activation in ACTIVATION_NAMES)
        self.index, self.window = attention.layer_idx, attention_window(attention, config)
        head_dim = attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        heads = [weights.num_rows(projection) // head_dim for projection in projections]
        _require(heads[1] == heads[2])
        self.num_heads, self.num_kv_heads = heads[:2]
        self.kv_shape = KVShape(self.num_kv_heads, head_dim, head_dim, attention.k_proj.weight.dtype)

    def packed(self, output_norm: Norm, weights: Weights, device: torch.device) -> Layer:
        """The stack's layer, with joined and packed linears on a device; drops the original layer."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        ranks = None if weights.shards is None else weights.shards.collective
        mixture = _mixture(mlp, weights, device) if self.is_sparse else None
        if self.is_sparse:
            _require((weights.cut(mlp.experts, "down_proj") is None) == (ranks is None))
            mlp = getattr(mlp, "shared_expert", None)
        qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj], weights, device)
        out = _part(_joined([attention.o_proj], weights, device), ranks)
        up = None if mlp is None else _joined([mlp.gate_proj, mlp.up_proj], weights, device)
        down = None if mlp is None else _part(_joined([mlp.down_proj], weights, device), ranks)
        head_norms = None
        if _children(attention) >= HEAD_NORMS:
            head_norms = _norm(attention.q_norm, weights, device), _norm(attention.k_norm, weights, device)
            _require(len(head_norms[0].weight) == self.kv_shape.head_dim)
        attention_norm = _norm(self.layer.post_attention_layernorm, weights, device)
        del self.layer  # its weights are packed now
        return Layer(
            qkv=qkv,
            out=out,
            up=up,
            down=down,
            head_norms=head_norms,
            attention_norm=attention_norm,
            output_norm=output_norm,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.kv_shape.head_dim,
            scale=float(attention.scaling),
            terms=LogitTerms(self.window),
            activation=ACTIVATION_NAMES[self.activation],
            mixture=mixture,
            ranks=ranks,
        )


def _mixture(mlp: Any, weights: Weights, device: torch.device) -> Mixture:
    """The feed-forward half of experts that a module holds, packed."""
    router = router_of(mlp.gate, weights, device)
    if router is None:
        raise _OtherStructureError
    experts = grouped_experts(mlp.experts, weights, device).experts
    _require(experts.activation is not None and not mlp.experts.has_post_expert_norm)
    shared_gate = getattr(mlp, "shared_expert_gate", None)
    return Mixture(router, experts, None if shared_gate is None else _joined([shared_gate], weights, device))


def _joined(linears: list[Any], weights: Weights, device: torch.device) -> Linear:
    """One packed linear layer in place of several with the same input."""
    _require(all(type(linear) is nn.Linear for linear in linears))
    _require(len({linear.bias is None for linear in linears}) == 1)
    return pack_joined(linears, weights, device)


def _part(linear: Linear, ranks: Sum | None) -> Linear:
    """This rank's part of a layer whose outputs the stack itself adds up over the ranks."""
    _require(isinstance(linear, Reduced) == (ranks is not None))
    return linear.linear if isinstance(linear, Reduced) else linear


def attention_window(attention: Any, config: Any) -> int | None:
    """Keys that a query of this layer attends to; None for all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    window: int | None = getattr(config, "sliding_window", None)
    if window is None or config.model_type in WINDOW_EVERYWHERE:
        return window
    kinds = getattr(config, "layer_types", None)
    _require(kinds is not None and kinds[attention.layer_idx] == "full_attention")
    return None
