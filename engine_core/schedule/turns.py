"""Whose turn it is, as the scheduler asks. `engine_core.tenants` has the answers, by what each tenant was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from pagewire.engine_core.schedule.attachments import Tenant
from pagewire.engine_core.schedule.sequence import Sequence

Order: TypeAlias = Callable[[Sequence], tuple[int, int]]
"""(priority, arrival): the order in which sequences run; the least first."""


class TurnQueue(Protocol):
    """Sequences in state WAITING, which of them is next, and which running sequence makes room for others.

    order: in which sequences run.
    suspects: those that run only when nothing else does, because the worker crashed repeatedly with them in flight.
    """

    order: Order
    suspects: list[Sequence]

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no order."""

    def num_before(self, tenant: Tenant) -> int:
        """How full the queue is for a tenant: if full for others, it still has an equal share of the room."""

    def add(self, sequence: Sequence, *, alone: bool = False) -> None:
        """Queue a sequence. alone: among the suspects."""

    def first(self) -> Sequence | None:
        """The next sequence that is no suspect; None if there is none."""

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, which is about to get another state."""

    def withdraw(self, chosen: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove the sequences that are `chosen`, in the order of their arrival; `add` may queue them again."""

    def started(self, sequence: Sequence, num_tokens: int) -> None:
        """Count a sequence that has got a slot, with `num_tokens` prompt tokens to compute."""

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence that has lost its slot."""

    def preempted(self, sequence: Sequence) -> None:
        """Choose the place at which a sequence that is preempted will wait."""

    def gives_way(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        """The sequence that is preempted when `sequence` lacks blocks: it, or one behind it in `running`."""

    def change_of_room(self, running: list[Sequence], now: float) -> tuple[Sequence, Sequence] | None:
        """The sequence that gets room and the one that gives it; None if no room changes hands now."""


def by_arrival(sequence: Sequence) -> tuple[int, int]:
    """The order of the policy "fcfs"."""
    return 0, sequence.arrival


def by_priority(sequence: Sequence) -> tuple[int, int]:
    """The order of the policy "priority": the least first, among equal ones that of arrival."""
    return sequence.request.priority, sequence.arrival
