"""What was decoded a short time ago, so that the same picture or sound again costs no download and no decoding."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from pagewire.frontend.media.items import Decoded


class DecodedCache:
    """Decoded content by key, the least recently used dropped first. Thread-safe.

    max_bytes: of all content together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, Decoded] = OrderedDict()
        self._pending: dict[Hashable, Future[Decoded]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Decoded | None:
        """The content of a key; None if it is not kept."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
            return entry

    def get_or_make(self, key: Hashable, make: Callable[[], Decoded]) -> Decoded:
        """The content of a key, made if it is not kept. Threads that want the same key wait for the first of them.

        Raises:
            Exception: what `make` raised, here or in that other thread.
        """
        if (entry := self.get(key)) is not None:
            return entry
        with self._lock:
            pending = self._pending.get(key)
            is_first = pending is None
            if pending is None:
                pending = self._pending[key] = Future()
        if not is_first:
            return pending.result()
        try:
            pending.set_result(make())
        except BaseException as error:
            pending.set_exception(error)
            raise
        finally:
            self._settle(key, pending)
        return pending.result()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def _settle(self, key: Hashable, pending: Future[Decoded]) -> None:
        """Keep the result of a key, if there is one and it is not too large."""
        with self._lock:
            del self._pending[key]
            if pending.exception() is not None:
                return
            entry = pending.result()
            if (size := len(entry.data.data)) > self._max_bytes:
                return
            self._entries[key] = entry
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._num_bytes -= len(oldest.data.data)


class RecentKeys:
    """Values by key for a short time, the oldest dropped first. Thread-safe.

    seconds: how long. max_entries: how many.
    """

    def __init__(self, seconds: float, max_entries: int) -> None:
        self._seconds, self._max_entries = seconds, max_entries
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()

    def put(self, key: Hashable, value: Any) -> None:
        """Keep a value from now on."""
        with self._lock:
            self._entries[key] = (time.monotonic() + self._seconds, value)
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def get(self, key: Hashable) -> Any:
        """The value of a key; None if it is not kept any more."""
        with self._lock:
            until, value = self._entries.get(key, (0.0, None))
            if until > time.monotonic():
                return value
            with suppress(KeyError):
                del self._entries[key]
            return None

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
