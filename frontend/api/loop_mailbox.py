"""Wakes the tasks of an event loop that wait for output.

IO thread: deltas applied --> one call_soon_threadsafe per batch --> the tasks that wait for these requests
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from pagewire.frontend.requests.outputs import RequestState


class OutputListener:
    """Wakes one task when some of its requests have new output. (An `asyncio.Event` serves any number of tasks.)"""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: set[int] = set()
        self._arrival: asyncio.Future[None] | None = None

    def notify(self, key: int) -> None:
        """Record that the request `key` has new output, and wake the task."""
        self._ready.add(key)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def wait(self) -> set[int]:
        """Wait for new output; returns the keys of the requests that have some."""
        if not self._ready:
            self._arrival = self._loop.create_future()
            await self._arrival
        ready, self._ready = self._ready, set()
        return ready


class LoopMailbox:
    """Wakes the tasks of one event loop, with one call into it for all requests that have new output."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listeners: dict[int, OutputListener] = {}
        self._ready: set[int] = set()
        self._lock = threading.Lock()

    def open(self, keys: Iterable[int]) -> OutputListener:
        """A listener that waits for new output of the requests `keys`."""
        listener = OutputListener(self._loop)
        self._listeners.update(dict.fromkeys(keys, listener))
        return listener

    def close(self, keys: Iterable[int]) -> None:
        """Forget the listeners of these requests."""
        for key in keys:
            self._listeners.pop(key, None)

    def put(self, states: list[RequestState]) -> None:
        """Called on the client's thread."""
        with self._lock:
            idle = not self._ready
            self._ready.update([state.key for state in states])
        if idle:
            try:
                self._loop.call_soon_threadsafe(self._notify)
            except RuntimeError:
                pass  # the loop was closed with requests open: no task waits for them

    def _notify(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, set()
        for key in ready:
            if (listener := self._listeners.get(key)) is not None:
                listener.notify(key)
