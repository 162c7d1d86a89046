"""The collective of a group of one, and the group of the ranks that divide the layers of a stage."""

from __future__ import annotations

from torch import Tensor

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.ranks.interface import Collective


class SingleRank:
    """A group of one, as a `Collective`."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """`x` itself."""
        return x

    def barrier(self) -> None:
        """Return at once."""

    def part(self, size: int) -> SingleRank:
        """This group."""
        return self

    def send(self, x: Tensor, target: int) -> None:
        """Raises ValueError: there is no other rank."""
        raise ValueError("a group of one rank has none to send to")

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Raises ValueError: there is no other rank."""
        raise ValueError("a group of one rank has none to receive from")

    def close(self) -> None:
        """Nothing to give back."""


def shards_of(ranks: Collective, parallel: Parallel) -> Collective:
    """The ranks of this rank's stage, as a group of their own; all ranks of the group call this together.

    ranks: all of them.
    """
    if parallel.stages == 1:
        return ranks
    return SingleRank() if parallel.num_shards == 1 else ranks.part(parallel.num_shards)
