"""The sequences that wait for an adapter or are scheduled with one, and which adapter's turn is next.

Sequences of at most `max_active` adapters are scheduled at a time (`max_loras`). Of others, the adapter that has
waited longest comes next: for each one that has waited for `PATIENCE_SECONDS` with nothing but room missing, an
active one, the longest active first, gets no new sequences until it has ended its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from pagewire.engine_core.adapters.adapter import Adapter, Residence, adapter_of
from pagewire.engine_core.schedule.sequence import Sequence

PATIENCE_SECONDS = 0.5  # that an adapter waits for room before the active ones get no new sequences


@dataclass(frozen=True)
class Turns:
    """overdue: adapters that have waited long for room alone. closed: active ones that make room for them."""

    overdue: set[Adapter] = field(default_factory=set)
    closed: set[Adapter] = field(default_factory=set)


class AdapterQueue:
    """Sequences by adapter. Pure, as the scheduler is: no IO, no clock.

    max_active: the most adapters with scheduled sequences.

    Attributes:
        waiting: sequences that wait, by adapter, in the order in which the adapters came. An adapter may be without
            any: then a call waits for it, or it is pinned and not in memory.
        scheduled: sequences that the scheduler has, by adapter, the longest active first.
    """

    def __init__(self, max_active: int) -> None:
        self.waiting: dict[Adapter, dict[Sequence, None]] = {}
        self.scheduled: dict[Adapter, set[Sequence]] = {}
        self._max_active = max_active

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self.waiting.values():
            yield from sequences

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def names_waiting(self) -> list[str]:
        """Names of the adapters for which sequences wait."""
        return names(self)

    def names_running(self) -> list[str]:
        """Names of the adapters of scheduled sequences."""
        return names(sequence for sequences in self.scheduled.values() for sequence in sequences)

    def uses(self, adapter: Adapter) -> bool:
        """True while an adapter is waited for, or has scheduled sequences."""
        return adapter in self.waiting or adapter in self.scheduled

    def want(self, adapter: Adapter, now: float) -> None:
        """Queue an adapter, unless it waits already."""
        if adapter not in self.waiting:
            self.waiting[adapter] = {}
            adapter.since = now

    def add(self, sequence: Sequence, adapter: Adapter, now: float) -> None:
        """Let a sequence wait for its adapter."""
        self.want(adapter, now)
        self.waiting[adapter][sequence] = None

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out of those that wait; False if it is none of them."""
        adapter = adapter_of(sequence)
        if adapter is None or sequence not in self.waiting.get(adapter, ()):
            return False
        del self.waiting[adapter][sequence]
        return True

    def turns(self, now: float, may_read: Callable[[Adapter], bool]) -> Turns:
        """Whose turn it is. may_read: whether the workers may read an adapter, as far as others are concerned."""
        overdue = set()
        for adapter in self.waiting:
            if now - adapter.since < PATIENCE_SECONDS:
                continue
            is_stuck = adapter.residence is Residence.ABSENT and may_read(adapter)
            if (adapter.resident or is_stuck) and adapter not in self.scheduled:
                overdue.add(adapter)
        return Turns(overdue, set(islice(self.scheduled, len(overdue))))

    def may_run(self, adapter: Adapter, turns: Turns) -> bool:
        """Whether the sequences that wait for an adapter may be scheduled, once it is resident."""
        if adapter in self.scheduled:
            return adapter not in turns.closed
        return (not turns.overdue or adapter in turns.overdue) and len(self.scheduled) < self._max_active

    def take(self, adapter: Adapter) -> list[Sequence]:
        """Take all sequences that wait for an adapter; it stays in the queue itself."""
        taken, self.waiting[adapter] = list(self.waiting[adapter]), {}
        return taken

    def schedule(self, sequence: Sequence, adapter: Adapter) -> None:
        """Record that a sequence is scheduled."""
        self.scheduled.setdefault(adapter, set()).add(sequence)

    def ended(self, sequence: Sequence, adapter: Adapter) -> bool:
        """Record that a scheduled sequence has ended; True if it was the last one of its adapter."""
        scheduled = self.scheduled.get(adapter, set())
        if sequence not in scheduled:
            return False
        scheduled.discard(sequence)
        if scheduled:
            return False
        del self.scheduled[adapter]
        return True

    def take_back(self, sequences: Iterable[Sequence], now: float) -> None:
        """Let scheduled sequences wait again, before those that wait already."""
        returned: dict[Adapter, dict[Sequence, None]] = {}
        for sequence in sequences:
            adapter = adapter_of(sequence)
            assert adapter is not None
            self.scheduled[adapter].discard(sequence)
            returned.setdefault(adapter, {})[sequence] = None
        for adapter, group in returned.items():
            if not self.scheduled[adapter]:
                del self.scheduled[adapter]
            group |= self.waiting.pop(adapter, {})
            adapter.since = now
        self.waiting = returned | self.waiting


def name_of(sequence: Sequence) -> str:
    """The name under which a sequence's request names its adapter."""
    source = sequence.request.adapter
    return "" if source is None else source.name


def names(sequences: Iterable[Sequence]) -> list[str]:
    """The names under which requests name their adapters, each once."""
    return sorted({name_of(sequence) for sequence in sequences})
