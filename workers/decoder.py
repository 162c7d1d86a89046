"""The decoder stack of Llama-like models in few, large steps.

    x -> norm -> QKV in one product -> (norm of each head) -> rotary -> attention -> output product -> add and norm
      -> gate and up in one product -> activation -> down product -> add and norm -> next layer

The weights are the module's own. A stack is built where the module's structure is the common one, and serves only
if it then proves equal to the module (see `proof.py`): models of the same structure with other arithmetic keep
their own forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.layers import add_rms_norm, gelu_tanh_and_mul, rms_norm, rotary, silu_and_mul
from pagewire.workers.attention import Paged
from pagewire.workers.fuse import PackedLinear, RMSNorm, RotaryTable, norm_kernel

BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
WINDOW_EVERYWHERE = {"mistral"}  # their layers read the window from the configuration
GATES = {"silu": silu_and_mul, "swish": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}


def build_stack(base: Any) -> DecoderStack | None:
    """The stack equal to `base` in structure, or None if there is none."""
    try:
        return DecoderStack(base)
    except (_OtherStructureError, AttributeError):
        return None


class _OtherStructureError(Exception):
    pass


def _require(condition: bool) -> None:
    if not condition:
        raise _OtherStructureError


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _norm(module: nn.Module) -> RMSNorm:
    norm = norm_kernel(module)
    if norm is None:
        raise _OtherStructureError
    return norm


def joined(*linears: Any) -> PackedLinear:
    """Linear layers over the same input as one."""
    _require(all(type(linear) is nn.Linear for linear in linears))
    biases = [linear.bias for linear in linears]
    _require(all(b is None for b in biases) or all(b is not None for b in biases))
    bias = None if biases[0] is None else torch.cat(biases)
    return PackedLinear(torch.cat([linear.weight for linear in linears]), bias)


class DecoderStack(nn.Module):
    """Takes the place of a causal model's base."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        _require(_children(base) == BASE and type(base.embed_tokens) is nn.Embedding)
        self.embed_tokens = base.embed_tokens
        _require(isinstance(base.rotary_emb, RotaryTable))
        self.rotary = base.rotary_emb
        self.norm = _norm(base.norm)
        self.layers = [DecoderLayer(layer, base.config) for layer in base.layers]
        self.norms = [(n.weight, n.eps, n.offset) for n in self._norms(base)]

    def _norms(self, base: Any) -> list[RMSNorm]:
        found = []
        for layer in base.layers:
            found += [_norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)]
        return [*found, self.norm]

    @property
    def num_bytes(self) -> int:
        """Bytes of the layers' weights."""
        norms = sum(weight.nbytes for weight, _, _ in self.norms[:-1])
        return norms + sum(layer.num_bytes for layer in self.layers)

    def forward(self, input_ids: Tensor, position_ids: Tensor, paged: Paged, **_: Any) -> tuple[Tensor]:
        """Tokens int64 [1, T] at int64 [1, T] to hidden states [1, T, H]."""
        residual = self.embed_tokens(input_ids[0])
        cos, sin = self.rotary(residual[None], position_ids)
        cos, sin = cos[0], sin[0]
        norms = iter(self.norms)
        weight, eps, offset = next(norms)
        x = rms_norm(residual, weight, eps, offset=offset)
        for layer in self.layers:
            x = layer.attend(x, cos, sin, paged)
            weight, eps, offset = next(norms)
            x = layer.feed_forward(add_rms_norm(x, residual, weight, eps, offset=offset))
            weight, eps, offset = next(norms)
            x = add_rms_norm(x, residual, weight, eps, offset=offset)
        return (x[None],)


class DecoderLayer:
    """One layer's weights, and its two halves."""

    def __init__(self, layer: Any, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        _require(_children(layer) == LAYER)
        _require(_children(attention) in (ATTENTION, ATTENTION | HEAD_NORMS))
        _require(_children(mlp) - {"act_fn"} == MLP - {"act_fn"})
        gate = GATES.get(
            str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None))
        )
        _require(gate is not None)
        assert gate is not None
        self.gate = gate
        self.index, self.scale = attention.layer_idx, float(attention.scaling)
        self.window = attention_window(attention, config)
        self.head_dim = attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.num_heads = [projection.out_features // self.head_dim for projection in projections]
        self.head_norms = None
        if _children(attention) >= HEAD_NORMS:
            self.head_norms = _norm(attention.q_norm), _norm(attention.k_norm)
            _require(len(self.head_norms[0].weight) == self.head_dim)
        linears = [
            joined(attention.q_proj, attention.k_proj, attention.v_proj),
            joined(attention.o_proj),
            joined(mlp.gate_proj, mlp.up_proj),
            joined(mlp.down_proj),
        ]
        self.num_bytes = sum(linear.num_bytes for linear in linears)
        self.qkv, self.out, self.gate_up, self.down = (linear.forward for linear in linears)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, paged: Paged) -> Tensor:
        """x [T, H], cos and sin [T, rot_dim] to [T, H]."""
        num_tokens = x.shape[0]
        qkv = self.qkv(x).view(num_tokens, -1, self.head_dim)
        q, k, v = torch.split(qkv, self.num_heads, 1)
        if self.head_norms is not None:
            q, k = self.head_norms[0](q), self.head_norms[1](k)
        rotary(q, k, cos, sin)
        attended = paged.attend(self.index, q, k, v, self.scale, self.window)
        return self.out(attended.view(num_tokens, -1))

    def feed_forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        return self.down(self.gate(self.gate_up(x)))


def attention_window(attention: Any, config: Any) -> int | None:
    """How many keys a query of this layer sees; None: all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    window: int | None = getattr(config, "sliding_window", None)
    _require(window is None or config.model_type in WINDOW_EVERYWHERE)
    return window
