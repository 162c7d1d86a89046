"""Packs matrices, and proves each quantised product by itself, on inputs that lose nothing when they are quantised.

The proof of the whole model (`proof.py`) has to allow for the rounding of activations to 8 bits, which would hide
small errors of a single product. Here nothing is rounded: multiples of 1/128 whose largest is 127/128 in every
group of columns, also without an outlier, are 8-bit integers times a power of two; up to 14/128 they are 8-bit
floats times one. So the product is exact but for a few float32 sums.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pagewire.kernels.data.floats import Floats
from pagewire.kernels.data.weight import DENSE
from pagewire.kernels.linear import Linear, Weight, pack
from pagewire.workers.errors import LoadError

NUM_INPUTS = 4
NUM_OUTPUTS = 64  # outputs of a product that are compared, spread over all of them
FULL_SCALE_STEP = 8  # one of this many columns holds the largest input: two of the fewest that share a scale
SUM_TOLERANCE = 1e-5  # of float32 sums over some 100,000 columns, as a share of the sum of absolute terms


def packed(weight: Weight, bias: Tensor | None, device: torch.device) -> Linear:
    """A linear layer on a device over a packed weight; a quantised one is proven.

    Raises:
        LoadError: the product differs from the one with the dequantised weight.
    """
    product = pack(weight, bias, device)
    if weight.scheme is not DENSE:
        check_product(product, weight, bias, device)
    return product


def check_product(product: Linear, weight: Weight, bias: Tensor | None, device: torch.device) -> None:
    """Compare some outputs of a product with those of the dequantised weight.

    Raises:
        LoadError: they differ by more than rounding.
    """
    num_out, num_in = weight.shape
    index = torch.linspace(0, num_out - 1, min(num_out, NUM_OUTPUTS)).long()
    x = exact_inputs(num_in, 14 if isinstance(weight.scheme, Floats) else 127)
    actual = product(x.to(device, weight.dtype)).cpu().double()[:, index]
    rows = replace(weight.take(index), dtype=torch.float32).dense().cpu().double()
    expected = x.double() @ rows.T
    rounding = torch.finfo(weight.dtype).eps / 2
    terms = x.double().abs() @ rows.abs().T
    if bias is not None:
        shift = bias[index].cpu().to(weight.dtype).double()
        expected, terms = expected + shift, terms + shift.abs()
    # A device without a kernel for the scheme multiplies with weights that are rounded to its dtype.
    allowed = rounding * (expected.abs() + terms) + SUM_TOLERANCE * terms
    if not bool(((actual - expected).abs() <= allowed).all()):
        worst = float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
        raise LoadError(
            f"the product with a weight {list(weight.shape)} of scheme {weight.scheme.name} is wrong "
            f"(by {worst:.1%})"
        )


def exact_inputs(num_in: int, most: int = 127) -> Tensor:
    """Inputs [4, K] that 8 bits hold exactly, by row and by group; those of the last row are all positive.

    most: 127 for integers; 14 also for 8-bit floats.
    """
    generator = torch.Generator().manual_seed(num_in)
    x = torch.randint(-most, most + 1, (NUM_INPUTS, num_in), generator=generator)
    x[:, ::FULL_SCALE_STEP] = most
    x[1, ::FULL_SCALE_STEP] = -most
    x[-1].abs_()
    return x / 128
