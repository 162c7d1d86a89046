"""Threads for slow work of one kind, so that it cannot occupy the threads that other requests need."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pagewire.ipc.errors import EngineBusyError

T = TypeVar("T")


class SlowWork:
    """A few threads with a bounded queue, for any number of event loops.

    kind: what the work is, in the plural, for errors. max_waiting: pieces of work that may wait for a thread.
    """

    def __init__(self, kind: str, num_threads: int, max_waiting: int) -> None:
        self._kind, self._max_waiting = kind, max_waiting
        self._threads = ThreadPoolExecutor(num_threads, kind)
        self._places = threading.Semaphore(num_threads + max_waiting)

    async def run(self, work: Callable[[], T]) -> T:
        """Return `work()`, run in one of the threads.

        A caller that is cancelled gives its place up; but work that has begun counts until it has ended.

        Raises:
            EngineBusyError: too much is waiting.
        """
        if not self._places.acquire(blocking=False):
            raise EngineBusyError(f"{self._max_waiting} {self._kind} are already waiting")
        pieces = [work]
        future = self._threads.submit(lambda: pieces.pop()())
        future.add_done_callback(lambda _: self._places.release())
        try:
            return await asyncio.wrap_future(future)  # a cancellation of this cancels `future`
        except asyncio.CancelledError:
            pieces.clear()  # the queue keeps what was cancelled, but not what it refers to
            raise
