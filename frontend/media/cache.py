"""Recently decoded pictures and sounds, so that the same one again costs no download and no decoding."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from pagewire.frontend.media.items import Decoded
from pagewire.ipc.recent import Recent


class DecodedCache:
    """Decoded content by key, the least recently used dropped first. Thread-safe.

    max_bytes: of all content together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._entries: Recent[Hashable, Decoded] = Recent(max_bytes)
        self._pending: dict[Hashable, Future[Decoded]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Decoded | None:
        """The content of a key; None if it is not kept."""
        with self._lock:
            return self._entries.get(key)

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

    def _settle(self, key: Hashable, pending: Future[Decoded]) -> None:
        """Keep the result of a key, if there is one."""
        with self._lock:
            del self._pending[key]
            if pending.exception() is not None:
                return
            entry = pending.result()
            self._entries.put(key, entry, entry.num_bytes)


class RecentKeys:
    """Values by key for a short time, those used least recently dropped first. Thread-safe.

    seconds: how long. max_bytes: of all together.
    """

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._entries: Recent[Hashable, tuple[float, Any]] = Recent(max_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all values that are kept."""
        return self._entries.num_bytes

    def put(self, key: Hashable, value: Any, num_bytes: int) -> None:
        """Keep a value from now on. num_bytes: what it holds, with its key."""
        with self._lock:
            self._entries.put(key, (time.monotonic() + self._seconds, value), num_bytes)

    def get(self, key: Hashable) -> Any:
        """The value of a key; None if it is not kept any more."""
        with self._lock:
            until, value = self._entries.get(key) or (0.0, None)
            if until > time.monotonic():
                return value
            self._entries.drop(key)
            return None

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
