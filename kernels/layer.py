"""One layer of a Llama-like decoder: its weights as functions, its norms, its shape."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Activation(Enum):
    """The function between the two products of a gated feed-forward."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, as `layers.rms_norm` computes it."""

    weight: Tensor
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Its products are functions that `linear.pack` made."""

    qkv: Callable[[Tensor], Tensor]
    """[T, H] to [T, (Hq + 2 Hkv) D]."""
    out: Callable[[Tensor], Tensor]
    """[T, Hq D] to [T, H]."""
    gate_up: Callable[[Tensor], Tensor]
    """[T, H] to [T, 2 I]."""
    down: Callable[[Tensor], Tensor]
    """[T, I] to [T, H]."""
    head_norms: tuple[Norm, Norm] | None
    """Of each query head and each key head, before they are rotated."""
    attention_norm: Norm
    """After attention."""
    next_norm: Norm
    """After the feed-forward half: the next layer's first norm, or the stack's last."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    activation: Activation
