"""Sums that are exact, and so the same in any order: of numbers rounded to multiples of a fraction."""

import math

import torch
from torch import Tensor


def fixed_sums(x: Tensor, ends: Tensor, one: float) -> Tensor | None:
    """Sums over the rows of each segment: of elements times `one`, rounded to integers.

    Args:
        x: [T, H], contiguous, T at least 1. ends: int64 [n], ascending to T: behind the last row of each segment.
        one: finite, at most 2**30: the sums stand for sums of rows up to 2**33.

    Returns:
        int64 [n, H]; None if some elements are not finite.
    """
    scaled = x.double() * one
    if not math.isfinite(scaled.sum().item()):  # float64 numbers that were float32 cannot overflow
        return None
    sums = scaled.round_().long().cumsum(0).index_select(0, ends - 1)
    return torch.cat((sums[:1], sums.diff(dim=0)))  # what wraps around is back in the difference
