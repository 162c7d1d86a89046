"""A layer of a Llama-like decoder: its linear layers, its norms, its shape."""

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from pagewire.kernels.weight import Linear


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


HeadNorms = tuple[Norm, Norm]
"""The norms of query heads and of key heads, before they are rotated."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a stack."""

    qkv: Linear
    """[T, H] to [T, (Hq + 2 Hkv) D]."""
    out: Linear
    """[T, Hq D] to [T, H]."""
    gate_up: Linear
    """[T, H] to [T, 2 I]."""
    down: Linear
    """[T, I] to [T, H]."""
    head_norms: HeadNorms | None
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
