"""Kernels that look through logits."""

from torch import Tensor

from pagewire.kernels.implementation import implementation_for

__all__ = ["largest"]


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row, and the lowest column that holds it.

    Args:
        x: [R, V], any float dtype, V contiguous and at least 1.

    Returns:
        values float32 [R], NaN where a row holds one, and columns int64 [R], which mean nothing there.
    """
    return implementation_for(x).largest(x)
