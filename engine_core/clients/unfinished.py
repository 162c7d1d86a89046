"""The unfinished sequences of one frontend, by the key of their request, and the memory that each request takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pagewire.engine_core.schedule.sequence import Sequence


class UnfinishedRequest(NamedTuple):
    """The unfinished sequences of a request by their index, and what gives its memory back."""

    group: dict[int, Sequence]
    release: Callable[[], None]


class UnfinishedRequests:
    """Sequences by (key, index). The memory of a request is given back with its last sequence."""

    def __init__(self) -> None:
        self._requests: dict[int, UnfinishedRequest] = {}

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._requests)

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences."""
        for request in self._requests.values():
            yield from request.group.values()

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return sum(len(request.group) for request in self._requests.values())

    def add(self, key: int, group: Iterable[Sequence], release: Callable[[], None]) -> None:
        """Enter the sequences of a request. release: gives its memory back."""
        request = UnfinishedRequest({sequence.index: sequence for sequence in group}, release)
        self._requests[key] = request
        for sequence in request.group.values():
            sequence.awaited = True

    def end(self, key: int, index: int) -> Sequence | None:
        """Remove a sequence, and return it; None if there is none."""
        request = self._requests.get(key)
        sequence = None if request is None else request.group.pop(index, None)
        if sequence is not None:
            sequence.awaited = False
            if not self._requests[key].group:
                self.end_all(key)
        return sequence

    def end_all(self, key: int) -> list[Sequence]:
        """Remove the sequences of a request, and return them."""
        if (request := self._requests.pop(key, None)) is None:
            return []
        request.release()
        for sequence in request.group.values():
            sequence.awaited = False
        return list(request.group.values())

    def take_all(self) -> list[Sequence]:
        """Remove all sequences, and return them: their frontend is gone."""
        return [sequence for key in list(self._requests) for sequence in self.end_all(key)]
