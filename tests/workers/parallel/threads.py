"""A group of ranks in the threads of one process, which run one at a time: each until it waits for the others."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
        self.running = 0
        self.error: BaseException | None = None
        self.left = set(range(size))
        self.num_waits = 0  # turns that ranks have passed on, since one of them could go on
        self.everyone = Meeting(self, range(size))
        self.sent: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)  # by source and target
        self.parts: dict[range, Meeting] = {}

    def wait(self, rank: int, ready: Callable[[], bool]) -> None:
        """Give the turn to the others until a rank can go on. The turn is held by the caller."""
        while not ready():
            self.num_waits += 1
            assert self.num_waits <= 2 * self.size, "the ranks wait for each other, or for one that has ended"
            self.pass_on(rank)
            self.turn.wait_for(lambda: self.error or self.running == rank)
            if self.error is not None:
                raise BrokenGroupError from self.error
        self.num_waits = 0

    def pass_on(self, rank: int) -> None:
        """Give the turn to the next rank."""
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
                self.num_waits = 0
                self.left.discard(rank)
                self.pass_on(rank)


class Meeting:
    """An operation after another, which all of some ranks call together."""

    def __init__(self, threads: Threads, members: range) -> None:
        self.threads, self.members = threads, members
        self.given: dict[int, tuple[str, Tensor | None]] = {}
        self.taken: dict[int, tuple[str, Tensor | None]] = {}
        self.round = 0

    def exchange(self, rank: int, operation: str, x: Tensor | None) -> list[Tensor]:
        """The members' tensors, once each of them has called the same operation."""
        with self.threads.turn:
            self.given[rank] = operation, None if x is None else x.detach().clone()
            own_round = self.round
            if len(self.given) == len(self.members):
                self.taken, self.given = self.given, {}
                self.round += 1
            self.threads.wait(rank, lambda: self.round > own_round)
            operations = {name for name, _ in self.taken.values()}
            assert operations == {operation}, f"the ranks call different operations: {operations}"
            tensors = [self.taken[r][1] for r in self.members]
            if x is None:
                return []
            kinds = {(tuple(t.shape), t.dtype) for t in tensors if t is not None}
            assert len(kinds) == 1, f"the ranks give different tensors: {kinds}"
            return [t for t in tensors if t is not None]


class Rank:
    """A rank of a group of threads: a `Collective`.

    members: the ranks of `threads` that are in its group; default: all.
    """

    def __init__(self, number: int, threads: Threads, members: range | None = None) -> None:
        self.threads, self._number = threads, number
        members = range(threads.size) if members is None else members
        self.rank, self.size = number - members.start, len(members)
        self._members = members
        self._meeting = (
            threads.everyone
            if self.size == threads.size
            else threads.parts.setdefault(members, Meeting(threads, members))
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`."""
        given = self._meeting.exchange(self._number, "all_reduce", x)
        total = given[0].float() if x.dtype in (torch.bfloat16, torch.float16) else given[0].clone()
        for other in given[1:]:
            total += other
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collective.all_gather`."""
        return torch.cat(self._meeting.exchange(self._number, "all_gather", x), dim=-1)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See `Collective.broadcast`."""
        return x.copy_(self._meeting.exchange(self._number, f"broadcast from {source}", x)[source])

    def barrier(self) -> None:
        """See `Collective.barrier`."""
        self._meeting.exchange(self._number, "barrier", None)

    def part(self, size: int) -> Rank:
        """See `Collective.part`."""
        first = self._number - self._number % size
        return Rank(self._number, self.threads, range(first, first + size))

    def send(self, x: Tensor, target: int) -> None:
        """See `Collective.send`."""
        self.send_object(x.detach().clone(), target)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """See `Collective.receive`."""
        received = self.receive_object(source)
        assert received.shape == x.shape and received.dtype == x.dtype
        return x.copy_(received)

    def send_object(self, x: Any, target: int) -> None:
        """Send anything to a rank; the sender goes on."""
        with self.threads.turn:
            self.threads.sent[self.rank, target].append(x)

    def receive_object(self, source: int) -> Any:
        """What a rank has sent to this one."""
        queue = self.threads.sent[source, self.rank]
        with self.threads.turn:
            self.threads.wait(self._number, lambda: bool(queue))
            return queue.popleft()

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
