"""The sequences that wait for a slot, in order: the best priority, the least served tenant, its first in turn."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterator
from typing import TypeAlias

from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.schedule.tenants import TenantAccount, Tenants
from pagewire.ipc.shares import num_before

# Stale entries that a heap may hold beyond a quarter of the waiting ones, before it is rebuilt: they keep sequences
# that have ended, with their prompts, in memory.
MAX_STALE = 64
Order: TypeAlias = Callable[[Sequence], tuple[int, int]]
Heap: TypeAlias = list[tuple[int, int, int, Sequence]]


class WaitingQueue:
    """Sequences in state WAITING. O(log n) to add; a removal leaves an entry, skipped when it comes up.

    order: (priority, arrival) of a sequence.
    suspects: those that run only when nothing else does, because the worker crashed repeatedly with them in flight.
    """

    def __init__(self, order: Order, tenants: Tenants) -> None:
        self.suspects: list[Sequence] = []
        self._order = order
        self._tenants = tenants
        self._heaps: dict[TenantAccount, Heap] = {}  # of the tenants with a live entry
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live + len(self.suspects)

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no order."""
        yield from self.suspects
        for heap in self._heaps.values():
            yield from (entry[-1] for entry in heap if entry[-1].state is State.WAITING)

    def num_before(self, tenant: TenantAccount) -> int:
        """How full the queue is for a tenant: if full for others, it still has an equal share of the room."""
        return num_before(tenant.num_waiting, len({*self._heaps, tenant}), len(self))

    def add(self, sequence: Sequence, *, alone: bool = False) -> None:
        """Queue a sequence. alone: among the suspects."""
        sequence.state = State.WAITING
        tenant = sequence.tenant
        if alone:
            insort(self.suspects, sequence, key=self._order)
            return
        if tenant not in self._heaps:
            self._tenants.enter(tenant, self._heaps)
            self._heaps[tenant] = []
        priority, arrival = self._order(sequence)
        heapq.heappush(self._heaps[tenant], (priority, sequence.turn, arrival, sequence))
        tenant.num_waiting += 1
        self._num_live += 1

    def first(self, *, of_idle: bool = False) -> Sequence | None:
        """The next sequence that is no suspect; None if there is none.

        of_idle: of the tenants without a running one.
        """
        best, best_key = None, None
        for tenant, heap in self._heaps.items():
            if of_idle and tenant.num_running:
                continue
            while heap[0][-1].state is not State.WAITING:
                heapq.heappop(heap)
            priority, _, arrival, sequence = heap[0]
            key = (priority, tenant.served, arrival)
            if best_key is None or key < best_key:
                best, best_key = sequence, key
        return best

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, which is about to get another state."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)
            return
        tenant = sequence.tenant
        heap = self._heaps[tenant]
        self._num_live -= 1
        tenant.num_waiting -= 1
        if tenant.num_waiting == 0:
            del self._heaps[tenant]
        elif heap[0][-1] is sequence:
            heapq.heappop(heap)
        elif len(heap) - tenant.num_waiting > tenant.num_waiting // 4 + MAX_STALE:
            live = (entry for entry in heap if entry[-1].state is State.WAITING)
            self._heaps[tenant] = [entry for entry in live if entry[-1] is not sequence]
            heapq.heapify(self._heaps[tenant])

    def withdraw(self, chosen: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove the sequences that are `chosen`, in the order of their arrival; `add` may queue them again."""
        suspects = [sequence for sequence in self.suspects if chosen(sequence)]
        self.suspects = [sequence for sequence in self.suspects if not chosen(sequence)]
        taken: list[Sequence] = []
        for tenant, heap in list(self._heaps.items()):
            live = [entry for entry in heap if entry[-1].state is State.WAITING]
            leaving = [entry[-1] for entry in live if chosen(entry[-1])]
            self._heaps[tenant] = [entry for entry in live if not chosen(entry[-1])]
            heapq.heapify(self._heaps[tenant])
            if not self._heaps[tenant]:
                del self._heaps[tenant]
            tenant.num_waiting -= len(leaving)
            taken += leaving
        self._num_live -= len(taken)
        return sorted(suspects + taken, key=lambda sequence: sequence.arrival)
