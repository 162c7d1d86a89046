"""Which running sequence gives way to others: one that needs blocks to go on, or one that has not begun.

Both choose the last sequence of the most served tenant, within the worst priority. With one tenant, that is the
last in order.

A tenant that begins should not wait for one that fills the engine with long outputs. So room changes hands: a
tenant without a running sequence gets that of one with several, and the beginning of a batch that of the later
part of another batch of the same tenant. Only a sequence that never ran gets room that way, so once for each.
A tenant without room does not wait for those before it in the queue that have some: they were served less, and it
would wait until they had caught up.
"""

from __future__ import annotations

from bisect import bisect_left

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.waiting import Order, WaitingQueue

PATIENCE_SECONDS = 0.5  # that a sequence waits for a slot to get free
HANDOVER_SECONDS = 0.1  # between two slots that change hands: what was preempted is computed again


def gives_way(sequence: Sequence, running: list[Sequence], order: Order) -> Sequence:
    """The sequence that is preempted when `sequence` lacks blocks: it, or one behind it in `running`.

    What is before it must not be preempted: it may be in this step already.
    """
    behind = running[bisect_left(running, order(sequence), key=order) :]
    return max(behind, key=lambda other: last(other, order))


def change_of_room(
    waiting: WaitingQueue, running: list[Sequence], order: Order, now: float
) -> tuple[Sequence, Sequence] | None:
    """The sequence that gets room and the one that gives it; None if no room changes hands now.

    It is for the next that waits, or else for the next of a tenant without any room and of the same priority.
    """
    first = None if waiting.suspects else waiting.first()
    if first is None:
        return None
    for newcomer in dict.fromkeys((first, waiting.first(of_idle=True))):
        if newcomer is not None and order(newcomer)[0] == order(first)[0]:
            leaving = gives_room(newcomer, running, order, now)
            if leaving is not None:
                return newcomer, leaving
    return None


def gives_room(newcomer: Sequence, running: list[Sequence], order: Order, now: float) -> Sequence | None:
    """The running sequence whose room goes to `newcomer`, which is the next that waits; None if it has to wait on.

    An idle one, if there is one: a sequence in flight cannot be preempted.
    """
    if newcomer.scheduled_time or now - newcomer.arrival_time < PATIENCE_SECONDS:
        return None
    candidates = [other for other in running if must_share(other, newcomer, order)]
    return max(candidates, key=lambda other: (not other.num_in_flight, last(other, order)), default=None)


def must_share(running: Sequence, newcomer: Sequence, order: Order) -> bool:
    """True if a running sequence has no better right to its room than `newcomer`, and is no suspect on trial."""
    if running.suspect or order(running)[0] < order(newcomer)[0]:
        return False
    if running.tenant is newcomer.tenant:
        return running.request.rank > 0 == newcomer.request.rank
    starts = newcomer.tenant.num_running == 0 and running.tenant.num_running > 1
    # More, not as much: what gives its room is queued again, and must not be before the newcomer there.
    return starts and running.tenant.served > newcomer.tenant.served


def last(sequence: Sequence, order: Order) -> tuple[int, float, int, int]:
    """The order in which sequences give way: the greatest first."""
    priority, arrival = order(sequence)
    return priority, sequence.tenant.served, sequence.turn, arrival
