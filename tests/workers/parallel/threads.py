"""A group of ranks in the threads of one process, which run one at a time: each until it waits for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class BrokenGroupError(RuntimeError):
    """Another rank of the group has failed."""


class Threads:
    """What the ranks of a group share. A rank runs only while it has the turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition()
        self.given: dict[int, tuple[str, Tensor | None]] = {}
        self.running = 0
        self.error: BaseException | None = None
        self.left = set(range(size))
        self.round = 0
        self.taken: dict[int, tuple[str, Tensor | None]] = {}
        self.num_operations = 0

    def exchange(self, rank: int, operation: str, x: Tensor | None) -> list[Tensor]:
        """All ranks' tensors, once each of them has called the same operation."""
        with self.turn:
            assert len(self.left) == self.size, "another rank has ended, which would leave this one waiting"
            self.given[rank] = operation, None if x is None else x.detach().clone()
            own_round = self.round
            if len(self.given) == self.size:
                self.taken, self.given = self.given, {}
                self.round += 1
                self.num_operations += 1
            self._pass_on(rank)
            self.turn.wait_for(lambda: self.error or (self.round > own_round and self.running == rank))
            if self.error is not None:
                raise BrokenGroupError from self.error
            operations = {name for name, _ in self.taken.values()}
            assert operations == {operation}, f"the ranks call different operations: {operations}"
            tensors = [self.taken[r][1] for r in range(self.size)]
            if x is None:
                return []
            kinds = {(tuple(t.shape), t.dtype) for t in tensors if t is not None}
            assert len(kinds) == 1, f"the ranks give different tensors: {kinds}"
            return [t for t in tensors if t is not None]

    def _pass_on(self, rank: int) -> None:
        self.running = min((r for r in self.left if r > rank), default=min(self.left, default=0))
        self.turn.notify_all()

    def run(self, rank: int, function: Callable[[Rank], T], results: list[T | None]) -> None:
        """Run a rank's function when it is its turn."""
        with self.turn:
            self.turn.wait_for(lambda: self.error or self.running == rank)
        try:
            if self.error is None:
                results[rank] = function(Rank(rank, self))
        except BrokenGroupError:
            pass
        except BaseException as error:
            with self.turn:
                self.error = self.error or error
        finally:
            with self.turn:
                self.left.discard(rank)
                if self.given:
                    self.error = self.error or AssertionError(f"rank {rank} ends, and others wait for it")
                self._pass_on(rank)


class Rank:
    """A rank of a group of threads: a `Collective`."""

    def __init__(self, rank: int, threads: Threads) -> None:
        self.rank, self.size = rank, threads.size
        self.threads = threads

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`."""
        given = self.threads.exchange(self.rank, "all_reduce", x)
        total = given[0].float() if x.dtype in (torch.bfloat16, torch.float16) else given[0].clone()
        for other in given[1:]:
            total += other
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collective.all_gather`."""
        return torch.cat(self.threads.exchange(self.rank, "all_gather", x), dim=-1)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See `Collective.broadcast`."""
        return x.copy_(self.threads.exchange(self.rank, f"broadcast from {source}", x)[source])

    def barrier(self) -> None:
        """See `Collective.barrier`."""
        self.threads.exchange(self.rank, "barrier", None)

    def close(self) -> None:
        """See `Collective.close`."""


def run_ranks(size: int, function: Callable[[Rank], T]) -> Sequence[T]:
    """The results of a function that each rank of a group runs.

    Raises:
        the first error of any rank; the others are ended.
    """
    shared = Threads(size)
    results: list[T | None] = [None] * size
    threads = [threading.Thread(target=shared.run, args=(rank, function, results)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if shared.error is not None:
        raise shared.error
    return results  # type: ignore[return-value] # without an error all have one
