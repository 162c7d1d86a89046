"""What the ranks of a worker group compute together, and what one of them sends to another.

Every rank calls the same operations in the same order, with tensors of the same shape and dtype. An operation lasts
until every rank has called it; but what is sent concerns two ranks only. There is no time limit: the core ends the
whole group when one of its ranks has ended or hangs, and a worker ends when its core has ended, also within an
operation.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """The operations of a rank on the tensors of its group.

    rank: of this process, in [0, size). size: number of ranks.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in its shape and dtype; it may be in the memory of `x`.

        Elements are added in ascending order of rank: half-precision types in float32, rounded once at the end,
        others in their own dtype. So all ranks get the same bits, and those of a row depend on no other row.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x` side by side in the order of the ranks: of [..., n] a new tensor [..., size * n]."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The `x` of rank `source`, in the memory of this rank's `x`, which is contiguous."""

    def barrier(self) -> None:
        """Return once every rank has called this; on a GPU, once the work that was launched before is done."""

    def part(self, size: int) -> Collective:
        """The group of `size` neighbouring ranks that this rank is one of: [0, size), [size, 2 size), ...

        All ranks call this together, with the same size; the group's size is a multiple.
        """

    def send(self, x: Tensor, target: int) -> None:
        """Send `x` to a rank. Returns as a rule before that rank takes it; `x` must not be changed any more."""

    def receive(self, x: Tensor, source: int) -> Tensor:
        """What a rank has sent to this one, in the memory of `x`: contiguous, and of the shape and dtype of that.

        Each receives once what another has sent, in the order in which it was sent.
        """

    def close(self) -> None:
        """Give back what the group holds. No operation may follow."""
