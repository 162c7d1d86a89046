"""The kernels of encoders in plain PyTorch; a part of `reference`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from pagewire.kernels.elementwise import elementwise
from pagewire.kernels.layer import Activation


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
) -> Tensor:
    """See `pagewire.kernels.layers.layer_norm`."""
    total = x if residual is None else x + residual
    return functional.layer_norm(total, weight.shape, weight, bias, eps)


def gelu_and_mul(x: Tensor) -> Tensor:
    """See `pagewire.kernels.layers.gelu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return elementwise(functional.gelu, gate) * up


def activate_each(x: Tensor, activation: Activation) -> Tensor:
    """See `pagewire.kernels.layers.activate_each`."""
    if activation is Activation.SILU:
        return elementwise(functional.silu, x)
    form = {Activation.GELU: "none", Activation.GELU_TANH: "tanh"}[activation]
    return elementwise(functional.gelu, x, approximate=form)


def encoder(layers: object, input_norm: object, *, norm_first: bool) -> None:
    """None: the layers run kernel by kernel."""
