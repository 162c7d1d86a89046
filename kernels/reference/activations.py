"""The functions between the two products of a feed-forward half, of each element by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.elementwise import elementwise
from pagewire.kernels.data.layer import Activation, LimitedGate, Xielu

SERIES = 8
"""The last power of the series of `expm1(x) - x` near 0, where the difference itself would lose its digits."""
NEAR = -0.5
"""From where on the series is taken."""


def activated(x: Tensor, activation: Activation | Xielu) -> Tensor:
    """See `Kernels.activate_each`."""
    if isinstance(activation, Xielu):
        return xielu(x if x.dtype == torch.float64 else x.float(), activation).to(x.dtype)
    if activation is Activation.RELU:
        return torch.relu(x)
    if activation is Activation.RELU_SQUARED:
        return torch.relu(x).square()
    if activation is Activation.SILU:
        return elementwise(functional.silu, x)
    if activation is Activation.GELU_QUICK:
        full = x.float()  # silu's form in PyTorch, which rounds once
        return (full * elementwise(torch.sigmoid, 1.702 * full)).to(x.dtype)
    form = {Activation.GELU: "none", Activation.GELU_TANH: "tanh"}[activation]
    return elementwise(functional.gelu, x, approximate=form)


def xielu(x: Tensor, parameters: Xielu) -> Tensor:
    """See `Xielu`; x and the result are float32 or float64."""
    capped = x.clamp(max=parameters.least)
    series = torch.zeros_like(x)
    for power in range(SERIES, 1, -1):  # 1 / 2 + x / 6 + ..., to be multiplied by the square
        series = series * capped / (power + 1) + 1.0
    near = series * capped * capped / 2
    beyond = torch.where(capped > NEAR, near, elementwise(torch.expm1, capped) - capped) + (capped - x)
    return parameters.slope * x + torch.where(
        x > 0, parameters.positive * x * x, parameters.negative * beyond
    )


def limited(x: Tensor, gate: LimitedGate, silu: Callable[[Tensor], Tensor]) -> Tensor:
    """[..., 2 I] to [..., I], see `LimitedGate`."""
    gates, up = x.chunk(2, -1)
    up = up.clamp(-gate.limit, gate.limit)
    if gate.slope is None:
        return silu(gates).clamp(max=gate.limit) * up
    gates = gates.clamp(max=gate.limit)
    return (up + 1) * (gates * elementwise(torch.sigmoid, gates * gate.slope))
