"""Numbers to integers with scales, and back: what `integers.py` defines, on all threads where there are kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.data.integers import Integers, check_quantisable
from pagewire.kernels.data.weight import Weight
from pagewire.kernels.dispatch import implementation_for


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
