"""Threads beside event loops, for work that would hold a loop up; large texts are tokenized one at a time.

Each kind of slow work has threads of its own, so that it cannot occupy those that other requests need.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

from pagewire.frontend import wiring
from pagewire.frontend.text.prompts import TextPair
from pagewire.frontend.text.tokenizer import LARGE_TEXT
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.fair_queue import FairQueue
from pagewire.ipc.tenants import current_tenant

T = TypeVar("T")

OFF_LOOP_CHARS = 8192  # take a few milliseconds to tokenize, or to put into a chat template
MAX_WAITING_TEXTS = 256
# Prompts whose pictures and sounds are fetched and decoded at the same time: each holds up to 300 MB meanwhile. A
# tenant's downloads from a slow host leave threads for others.
MEDIA_THREADS = 8
MEDIA_THREADS_OF_TENANT = 6
MAX_WAITING_MEDIA = 256

# Of texts, embeddings and answers: each takes a fraction of a second.
NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)  # as the threads of an event loop


class OffLoopCall:
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


class OffLoopThreads:
    """A few threads for one kind of slow work, with a bounded queue, for any number of event loops.

    Tenants take turns (`FairQueue`). kind: what the work is, in the plural, for errors.
    max_waiting: pieces of work that may wait for a thread.
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
        self._queue: FairQueue[OffLoopCall] = FairQueue(
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
        call = OffLoopCall(work)
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
            with self._queue.turn(OffLoopCall.begin) as call:
                call.run()
            del call  # its result is not held until the next one comes


_work = OffLoopThreads("texts", NUM_THREADS, math.inf, num_reserved=1)
# A tokenizer takes hundreds of bytes for a character. Smaller texts do not wait behind these.
_large_texts = OffLoopThreads("large texts", 1, MAX_WAITING_TEXTS)
media_threads = OffLoopThreads(
    "prompts with pictures or sounds",
    MEDIA_THREADS,
    MAX_WAITING_MEDIA,
    MEDIA_THREADS_OF_TENANT,
    num_reserved=1,
)
"""Does what blocks while the media of a prompt are fetched and decoded."""


def template_threads(max_waiting: int) -> OffLoopThreads:
    """Threads that render the chat templates of requests, as many as there are processes for it."""
    return OffLoopThreads(
        "chat templates", wiring.NUM_PARALLEL, max_waiting, num_reserved=wiring.NUM_RESERVED
    )


def num_chars(prompt: Any) -> int:
    """The characters of a prompt, or of a pair of texts, that are tokenized."""
    if isinstance(prompt, TextPair):
        return len(prompt.first) + len(prompt.second)
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(text) if isinstance(text, str) else 0


async def off_loop(size: int, work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`, run in a thread if `size` (in characters) is large enough to block the event loop.

    Threads work in the turns of tenants: a thousand texts of one do not hold up those of another.
    """
    if size >= OFF_LOOP_CHARS:
        return await _work.run(lambda: work(*args))
    return work(*args)


async def tokenize_off_loop(num_chars: int, work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`, which tokenizes texts. num_chars: of the longest one.

    It runs as with `off_loop`; but work on large texts of all requests waits for a thread of its own. A caller that
    is cancelled meanwhile gives its place up.

    Raises:
        EngineBusyError: too many large texts are waiting.
    """
    if num_chars >= LARGE_TEXT:
        return await _large_texts.run(lambda: work(*args))
    return await off_loop(num_chars, work, *args)
