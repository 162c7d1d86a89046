"""The sequences that wait for a slot, in order."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from typing import TypeAlias

from pagewire.engine_core.schedule.sequence import Sequence, State

MAX_STALE = 64  # stale entries that the heap may hold beyond the number of waiting ones, before it is rebuilt
Order: TypeAlias = Callable[[Sequence], tuple[int, int]]


class WaitingQueue:
    """Sequences in state WAITING, by `order`. O(log n) to add; a removal leaves an entry, skipped when it comes up.

    suspects: those that run only when nothing else does, because the worker crashed repeatedly with them in flight.
    """

    def __init__(self, order: Order) -> None:
        self.suspects: list[Sequence] = []
        self._order = order
        self._heap: list[tuple[int, int, Sequence]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live + len(self.suspects)

    def add(self, sequence: Sequence, *, alone: bool = False) -> None:
        """Queue a sequence. alone: among the suspects."""
        sequence.state = State.WAITING
        if alone:
            insort(self.suspects, sequence, key=self._order)
        else:
            heapq.heappush(self._heap, (*self._order(sequence), sequence))
            self._num_live += 1

    def first(self) -> Sequence | None:
        """The next sequence in order that is no suspect; None if there is none."""
        while self._heap and self._heap[0][-1].state is not State.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, which is about to get another state."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)
            return
        self._num_live -= 1
        if self._heap[0][-1] is sequence:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * self._num_live + MAX_STALE:
            live = (entry for entry in self._heap if entry[-1].state is State.WAITING)
            self._heap = [entry for entry in live if entry[-1] is not sequence]
            heapq.heapify(self._heap)
