"""The weights of linear layers packed for products, quantised, and dense again: all on the device's kernels."""

import torch
from torch import Tensor

from pagewire.kernels.data.integers import Integers, check_quantisable
from pagewire.kernels.data.weight import Linear, Weight, dense_weight
from pagewire.kernels.dispatch import implementation_for

__all__ = ["Linear", "Weight", "dense", "dense_weight", "multiplies_floats", "pack", "quantise"]


def pack(weight: Weight, bias: Tensor | None = None, device: torch.device | None = None) -> Linear:
    """A linear layer with its weight laid out for the fastest product on a device.

    On the CPU the layer owns a packed copy, made of a few rows at a time: the weight's tensors can be let go, and
    are never in memory as a whole in another dtype.

    Args:
        weight: [N, K].
        bias: [N], in any float dtype.
        device: where the product runs; default: the weight's device.

    Returns:
        a function of x [..., K] to `x @ weight.T + bias` [..., N]. Sums are float32. A row's bits do not depend
        on how many rows there are (those of dense weights on a GPU may). Integers: the CPU's product rounds x to 8
        bits, see `reference.quantised`. A GPU's product with weights in 8 bits does where the checkpoint says that
        activations are quantised, see `cuda.quantised_linear`.

    Raises:
        ValueError: the bias does not fit the weight.
        NotImplementedError: the device is not served.
    """
    device = weight.parts[0].device if device is None else device
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"a bias of shape {tuple(bias.shape)} for {weight.shape[0]} outputs")
        bias = bias.to(device, weight.dtype)
    kernels = implementation_for(torch.empty(0, dtype=weight.dtype, device=device))
    return kernels.pack(weight.to(device), bias)


def multiplies_floats(dtype: torch.dtype, device: torch.device) -> bool:
    """True if products on a device with rows of a dtype have weights of 8-bit floats (`floats.Floats`) as they are.

    Raises:
        NotImplementedError: the device is not served.
    """
    return implementation_for(torch.empty(0, dtype=dtype, device=device)).multiplies_floats


def quantise(weight: Weight, scheme: Integers, scale_dtype: torch.dtype = torch.float16) -> Weight:
    """Any weight as the nearest one of a scheme without a table, to the bits of `integers.quantise`.

    Numbers are read in their own dtype, a few rows at a time, so that nothing but the result takes memory.

    Raises:
        ValueError: the scheme has a table, K is no multiple of the group, or a number is not finite.
    """
    check_quantisable(weight, scheme)
    kernels = implementation_for(torch.empty(0, dtype=torch.float32, device=weight.parts[0].device))
    return kernels.quantise(weight, scheme, scale_dtype)


def dense(weight: Weight) -> Tensor:
    """The matrix [N, K] of a weight in its dtype, to the bits of `Weight.dense`; may be a view."""
    if not isinstance(weight.scheme, Integers):
        return weight.dense()
    return implementation_for(torch.empty(0, dtype=weight.dtype, device=weight.parts[0].device)).dense(weight)
