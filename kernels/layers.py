"""The small kernels between the matrix products: norms, gated activations, rotary embedding.

Each follows the rounding of the Hugging Face module that it replaces. A row's bits do not depend on the batch.
"""

from torch import Tensor

from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.layer import Activation

__all__ = [
    *("activate_each", "add_rms_norm", "clamped_swiglu", "gelu_and_mul", "gelu_tanh_and_mul"),
    *("layer_norm", "rms_norm", "rotary", "silu_and_mul"),
]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last axis, computed in float32.

    With offset 0 the normed value is rounded to x's dtype before the product, as in Llama. With another offset
    (1 for Gemma) everything is float32 up to the result.

    Args:
        x: [..., N], N contiguous.
        weight: [N].
        out: of x's shape and dtype, contiguous; may be x itself. Made if not given.

    Returns:
        out, of x's shape and dtype.
    """
    return implementation_for(x, weight).rms_norm(x, weight, eps, offset=offset, out=out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """`residual += x` in place, rounded to its dtype; returns `rms_norm(residual, weight, eps, offset=offset)`.

    Args:
        x: [..., N].
        residual: like x, contiguous.
        weight: [N].
    """
    return implementation_for(x, residual, weight).add_rms_norm(x, residual, weight, eps, offset=offset)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last axis, computed in float32.

    Args:
        x: [..., N].
        weight: [N].
        bias: [N]; None: 0.
        residual: like x, is added to it first; the sum is rounded to x's dtype.

    Returns:
        A tensor of x's shape and dtype.
    """
    return implementation_for(x, weight).layer_norm(x, weight, bias, eps, residual=residual)


def activate_each(x: Tensor, activation: Activation) -> Tensor:
    """An activation of each element of x: SILU, GELU or GELU_TANH."""
    return implementation_for(x).activate_each(x, activation)


def gelu_and_mul(x: Tensor) -> Tensor:
    """[..., 2 I] to [..., I]: `gelu(first half) * second half`, the activation rounded before the product."""
    return implementation_for(x).gelu_and_mul(x)


def silu_and_mul(x: Tensor) -> Tensor:
    """[..., 2 I] to [..., I]: `silu(first half) * second half`, the activation rounded before the product."""
    return implementation_for(x).silu_and_mul(x)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """[..., 2 I] to [..., I]: `gelu(first half) * second half` with GELU's tanh form, rounded likewise."""
    return implementation_for(x).gelu_tanh_and_mul(x)


def clamped_swiglu(x: Tensor) -> Tensor:
    """gpt-oss's activation, [..., 2 I] to [..., I]; every step is rounded.

    Of each pair (gate, up) of neighbours in the last axis, with gate at most 7 and up from -7 to 7:
    `(up + 1) * (gate * sigmoid(1.702 * gate))`.
    """
    return implementation_for(x).clamped_swiglu(x)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates q and k in place: `x * cos + rotate_half(x) * sin` on the first `rot_dim` elements of each head.

    The two products and the sum are rounded to the dtype, as PyTorch does, so the result equals Hugging Face's
    to the bit (if cos and sin have q's dtype).

    Args:
        q: [T, Hq, D], any strides as long as D is contiguous.
        k: [T, Hkv, D], likewise.
        cos: [T, rot_dim], both halves given, as Hugging Face's rotary modules return them; rot_dim <= D.
        sin: likewise.
    """
    implementation_for(q, k, cos, sin).rotary(q, k, cos, sin)
