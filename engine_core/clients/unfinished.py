"""The unfinished sequences of one frontend, by the key of their request, and the memory that each request takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagewire.engine_core.clients.memory import Charge
from pagewire.engine_core.schedule.sequence import Sequence


class UnfinishedRequests:
    """Sequences by (key, index). The memory of a request is given back with its last sequence."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, Sequence]] = {}
        self._charges: dict[int, Charge] = {}

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._groups)

    def __contains__(self, key: int) -> bool:
        return key in self._groups

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences."""
        for group in self._groups.values():
            yield from group.values()

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return sum(map(len, self._groups.values()))

    def add(self, key: int, group: Iterable[Sequence], charge: Charge) -> None:
        """Enter the sequences of a request. charge: its memory."""
        self._groups[key] = {sequence.index: sequence for sequence in group}
        self._charges[key] = charge
        for sequence in self._groups[key].values():
            sequence.awaited = True

    def end(self, key: int, index: int) -> Sequence | None:
        """Remove a sequence, and return it; None if there is none."""
        group = self._groups.get(key, {})
        sequence = group.pop(index, None)
        if sequence is not None:
            sequence.awaited = False
            if not group:
                self.end_all(key)
        return sequence

    def end_all(self, key: int) -> list[Sequence]:
        """Remove the sequences of a request, and return them."""
        group = self._groups.pop(key, {})
        for sequence in group.values():
            sequence.awaited = False
        if (charge := self._charges.pop(key, None)) is not None:
            charge.release()
        return list(group.values())

    def release(self) -> None:
        """Give back the memory of all requests, because their frontend is gone and they are about to end."""
        for sequence in self:
            sequence.awaited = False
        charges, self._charges = self._charges, {}
        for charge in charges.values():
            charge.release()
