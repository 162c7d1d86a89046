"""The sequences that wait for a slot, in order: the best priority, the least served tenant, its first in turn."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import TypeAlias

from pagewire.engine_core.schedule.attachments import Tenant
from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.schedule.turns import Order, by_arrival, by_priority
from pagewire.engine_core.tenants.accounts import Account, Accounts, account_of
from pagewire.engine_core.tenants.handover import gives_room, last
from pagewire.ipc.shares import num_before

# Stale entries that a heap may hold beyond a quarter of the waiting ones, before it is rebuilt: they keep sequences
# that have ended, with their prompts, in memory.
MAX_STALE = 64
Heap: TypeAlias = list[tuple[int, int, int, Sequence]]


class WaitingQueue:
    """A `TurnQueue` of tenants. O(log n) to add; a removal leaves an entry, skipped when it comes up.

    policy: see `SchedulerConfig`.

    Attributes:
        tenants: whose sequences wait and run.
    """

    def __init__(self, policy: str, tenants: Accounts) -> None:
        self.order: Order = by_priority if policy == "priority" else by_arrival
        self.suspects: list[Sequence] = []
        self.tenants = tenants
        self._heaps: dict[Account, Heap] = {}  # of the tenants with a live entry
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live + len(self.suspects)

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no order."""
        yield from self.suspects
        for heap in self._heaps.values():
            yield from (entry[-1] for entry in heap if entry[-1].state is State.WAITING)

    def num_before(self, tenant: Tenant) -> int:
        """How full the queue is for a tenant: if full for others, it still has an equal share of the room."""
        account = account_of(tenant)
        return num_before(account.num_waiting, len({*self._heaps, account}), len(self))

    def add(self, sequence: Sequence, *, alone: bool = False) -> None:
        """Queue a sequence. alone: among the suspects."""
        sequence.state = State.WAITING
        account = account_of(sequence.tenant)
        if alone:
            insort(self.suspects, sequence, key=self.order)
            return
        if account not in self._heaps:
            self.tenants.enter(account, self._heaps)
            self._heaps[account] = []
        priority, arrival = self.order(sequence)
        heapq.heappush(self._heaps[account], (priority, sequence.turn, arrival, sequence))
        account.num_waiting += 1
        self._num_live += 1

    def first(self, *, of_idle: bool = False) -> Sequence | None:
        """The next sequence that is no suspect; None if there is none.

        of_idle: of the tenants without a running one.
        """
        best, best_key = None, None
        for account, heap in self._heaps.items():
            if of_idle and account.num_running:
                continue
            while heap[0][-1].state is not State.WAITING:
                heapq.heappop(heap)
            priority, _, arrival, sequence = heap[0]
            key = (priority, account.served, arrival)
            if best_key is None or key < best_key:
                best, best_key = sequence, key
        return best

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, which is about to get another state."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)
            return
        account = account_of(sequence.tenant)
        heap = self._heaps[account]
        self._num_live -= 1
        account.num_waiting -= 1
        if account.num_waiting == 0:
            del self._heaps[account]
        elif heap[0][-1] is sequence:
            heapq.heappop(heap)
        elif len(heap) - account.num_waiting > account.num_waiting // 4 + MAX_STALE:
            live = (entry for entry in heap if entry[-1].state is State.WAITING)
            self._heaps[account] = [entry for entry in live if entry[-1] is not sequence]
            heapq.heapify(self._heaps[account])

    def withdraw(self, chosen: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove the sequences that are `chosen`, in the order of their arrival; `add` may queue them again."""
        suspects = [sequence for sequence in self.suspects if chosen(sequence)]
        self.suspects = [sequence for sequence in self.suspects if not chosen(sequence)]
        taken: list[Sequence] = []
        for account, heap in list(self._heaps.items()):
            live = [entry for entry in heap if entry[-1].state is State.WAITING]
            leaving = [entry[-1] for entry in live if chosen(entry[-1])]
            self._heaps[account] = [entry for entry in live if not chosen(entry[-1])]
            heapq.heapify(self._heaps[account])
            if not self._heaps[account]:
                del self._heaps[account]
            account.num_waiting -= len(leaving)
            taken += leaving
        self._num_live -= len(taken)
        return sorted(suspects + taken, key=lambda sequence: sequence.arrival)

    # ------------------------------------------------------------ running sequences

    def started(self, sequence: Sequence, num_tokens: int) -> None:
        """Count a sequence that has got a slot, with `num_tokens` prompt tokens to compute."""
        account = account_of(sequence.tenant)
        self.tenants.selected(account)
        account.admit(sequence.turn, num_tokens)

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence that has lost its slot."""
        account_of(sequence.tenant).num_running -= 1

    def preempted(self, sequence: Sequence) -> None:
        """Let the later part of a batch, which is preempted, queue behind what waits already."""
        if sequence.request.rank:
            sequence.turn = max(sequence.turn, account_of(sequence.tenant).clock + 1)

    def gives_way(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        """The sequence that is preempted when `sequence` lacks blocks: it, or one behind it in `running`.

        What is before it must not be preempted: it may be in this step already.
        """
        behind = running[bisect_left(running, self.order(sequence), key=self.order) :]
        return max(behind, key=lambda other: last(other, self.order))

    def change_of_room(self, running: list[Sequence], now: float) -> tuple[Sequence, Sequence] | None:
        """The sequence that gets room and the one that gives it; None if no room changes hands now.

        It is for the next that waits, or else for the next of a tenant without any room and of the same priority.
        """
        first = None if self.suspects else self.first()
        if first is None:
            return None
        for newcomer in dict.fromkeys((first, self.first(of_idle=True))):
            if newcomer is not None and self.order(newcomer)[0] == self.order(first)[0]:
                leaving = gives_room(newcomer, running, self.order, now)
                if leaving is not None:
                    return newcomer, leaving
        return None
