"""Threads for slow work of one kind, so that it cannot occupy the threads that other requests need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pagewire.ipc.errors import EngineBusyError

T = TypeVar("T")


class SlowWork:
    """A few threads with a bounded queue.

    kind: what the work is, in the plural, for errors. max_waiting: pieces of work that may wait for a thread.
    """

    def __init__(self, kind: str, num_threads: int, max_waiting: int) -> None:
        self._kind, self._num_threads, self._max_waiting = kind, num_threads, max_waiting
        self._threads = ThreadPoolExecutor(num_threads, kind)
        self._num_unfinished = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return `work()`, run in one of the threads. Work whose caller has gone counts until it has ended.

        Raises:
            EngineBusyError: too much is waiting.
        """
        if self._num_unfinished >= self._num_threads + self._max_waiting:
            raise EngineBusyError(f"{self._max_waiting} {self._kind} are already waiting")
        self._num_unfinished += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(self._finished)
        return await asyncio.shield(future)

    def _finished(self, future: asyncio.Future[T]) -> None:
        self._num_unfinished -= 1
        if not future.cancelled():
            future.exception()  # the caller may have gone: then nobody else takes it
