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

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.turns import Order
from pagewire.engine_core.tenants.accounts import account_of

PATIENCE_SECONDS = 0.5  # that a sequence waits for a slot to get free


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
    giver, taker = account_of(running.tenant), account_of(newcomer.tenant)
    if giver is taker:
        return running.request.rank > 0 == newcomer.request.rank
    # More, not as much: what gives its room is queued again, and must not be before the newcomer there.
    return taker.num_running == 0 and giver.num_running > 1 and giver.served > taker.served


def last(sequence: Sequence, order: Order) -> tuple[int, float, int, int]:
    """The order in which sequences give way: the greatest first."""
    priority, arrival = order(sequence)
    return priority, account_of(sequence.tenant).served, sequence.turn, arrival
