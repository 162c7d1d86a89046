"""Kernels over logits, for sampling."""

from torch import Tensor

from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.reference import FRACTION_BITS

__all__ = ["FRACTION_BITS", "fixed_point_probabilities", "largest", "only_allowed"]


def largest(x: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The largest value of each row, and the lowest column that holds it.

    Args:
        x: [R, V], any float dtype, V contiguous and at least 1.
        allowed: int32 [R, ceil(V / 32)]: column i takes part if bit i % 32 of word i // 32 is set.

    Returns:
        values float32 [R], NaN for a row that contains NaN, and columns int64 [R] (arbitrary for such a row).
        A row without allowed columns has the value -inf.
    """
    return implementation_for(x).largest(x, allowed)


def only_allowed(x: Tensor, allowed: Tensor) -> Tensor:
    """x as new float32 [R, V], with -inf in columns that are not allowed. Arguments as for `largest`."""
    return implementation_for(x).only_allowed(x, allowed)


def fixed_point_probabilities(depths: Tensor) -> Tensor:
    """exp(-depth) as a 64-bit fixed-point number with `FRACTION_BITS` bits of fraction, rounded down.

    The exponential is spelled out in float32 additions and multiplications, each rounded to nearest, so that every
    implementation and every device gives the same bits: a sampled token depends on nothing else. It is exact at 0,
    never rises with depth, and errs by at most 8e-8 of itself.

    Args:
        depths: float32, at least 0; not NaN.

    Returns:
        int64, of the same shape, from 0 to 2**FRACTION_BITS.
    """
    return implementation_for(depths).fixed_point_probabilities(depths)
