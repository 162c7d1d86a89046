"""The collective of a group of one: its operations have nothing to do."""

from __future__ import annotations

from torch import Tensor


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
