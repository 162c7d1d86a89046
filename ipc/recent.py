"""Values that were used last, as many as a number of bytes has room for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 256  # of an entry, beside what its key and value hold


class Recent(Generic[K, V]):
    """Values by key, those used least recently dropped first. Not thread-safe.

    max_bytes: of all together; what has more is not kept.

    Attributes:
        num_bytes: of those that are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[V]:
        return iter([value for value, _ in self._entries.values()])

    def get(self, key: K) -> V | None:
        """The value of a key; None if it is not kept."""
        if (entry := self._entries.get(key)) is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep a value. num_bytes: what it holds, with its key."""
        self.drop(key)
        num_bytes += ENTRY_BYTES
        if num_bytes > self._max_bytes:
            return
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: K) -> None:
        """Forget the value of a key, if it is kept."""
        if (entry := self._entries.pop(key, None)) is not None:
            self.num_bytes -= entry[1]

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
        self.num_bytes = 0
