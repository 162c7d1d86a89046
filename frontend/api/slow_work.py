"""Threads for slow work of one kind, so that it cannot occupy the threads that other requests need."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.fair_queue import FairQueue
from pagewire.ipc.tenants import current_tenant

T = TypeVar("T")


class SlowCall:
    """Work that waits for a thread, or has begun; it runs in the context in which it was made.

    future: gets its result.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._context = copy_context()
        self._work: Callable[[], Any] | None = work

    def begin(self) -> bool:
        """Begin; False if the caller has stopped waiting."""
        return self.future.set_running_or_notify_cancel()

    def run(self) -> None:
        """Do the work."""
        work, self._work = self._work, None
        assert work is not None
        try:
            self.future.set_result(self._context.run(work))
        except BaseException as error:
            self.future.set_exception(error)
            del self, work  # else the error holds them, by its frames


class SlowWork:
    """A few threads with a bounded queue, for any number of event loops. Tenants take turns (`FairQueue`).

    kind: what the work is, in the plural, for errors. max_waiting: pieces of work that may wait for a thread.
    num_per_tenant: threads that one tenant may have at a time. num_reserved: threads that are left to tenants that
    have none.
    """

    def __init__(
        self,
        kind: str,
        num_threads: int,
        max_waiting: float,
        num_per_tenant: float = math.inf,
        num_reserved: int = 0,
    ) -> None:
        self._kind, self._num_threads, self._max_waiting = kind, num_threads, max_waiting
        self._queue: FairQueue[SlowCall] = FairQueue(
            num_per_tenant=num_per_tenant, num_places=num_threads, num_reserved=num_reserved
        )
        self._threads: list[threading.Thread] = []

    async def run(self, work: Callable[[], T]) -> T:
        """Return `work()`, run in one of the threads, in the turn of `current_tenant`.

        A caller that is cancelled gives its place up; but work that has begun counts until it has ended.

        Raises:
            EngineBusyError: too much is waiting.
        """
        tenant = current_tenant.get()
        if self._queue.num_before(tenant) >= self._num_threads + self._max_waiting:
            raise EngineBusyError(f"{self._max_waiting} {self._kind} are already waiting")
        call = SlowCall(work)
        self._queue.put(call, tenant)
        self._add_thread()
        try:
            result: T = await asyncio.wrap_future(call.future)  # a cancellation of this cancels the future
            return result
        finally:
            self._queue.remove(call)

    def _add_thread(self) -> None:
        if len(self._threads) < self._num_threads:
            self._threads.append(threading.Thread(target=self._serve, name=self._kind, daemon=True))
            self._threads[-1].start()

    def _serve(self) -> None:
        while True:
            with self._queue.turn(SlowCall.begin) as call:
                call.run()
            del call  # its result is not held until the next one comes
