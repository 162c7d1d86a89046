"""Linear layers whose inputs are divided over several ranks: each rank's product is a part of the sum."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from pagewire.kernels.data.weight import Linear


class Sum(Protocol):
    """The sum over the ranks of a group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, with the same bits on every rank; it may be in the memory of `x`."""


@runtime_checkable
class NativeSum(Sum, Protocol):
    """A sum over ranks that compiled code can call, on memory of a CPU."""

    @property
    def native_all_reduce(self) -> tuple[int, int]:
        """The addresses of a C function as `AllReduce` in stack.cpp, and of its first argument.

        They are valid as long as this object.
        """


class Reduced:
    """A linear layer whose inputs are divided over ranks: each call returns the sum of all ranks' products.

    linear: the product with this rank's columns of the weight. The bias, if there is one, is in rank 0's.
    """

    def __init__(self, linear: Linear, ranks: Sum) -> None:
        self.linear, self.ranks = linear, ranks
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype, self.num_bytes = linear.dtype, linear.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in_features] of this rank to [..., out_features], the same on all ranks."""
        return self.ranks.all_reduce(self.linear(x))
