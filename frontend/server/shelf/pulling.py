"""Pulls of models: each runs in a thread, and any number of clients follow it.

follow --> Pull --> steps          (the event loop)
            |
            +--> ipc/files/pull.py (a thread: blocks for minutes)
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from pagewire.frontend.server.http.errors import RETRY_SECONDS, APIError
from pagewire.ipc.files.hub_names import HubName
from pagewire.ipc.files.pull import PullProgress, pull
from pagewire.ipc.quoting import quoted

logger = logging.getLogger("pagewire.server")

MAX_PULLS = 4  # at a time


class Pull:
    """A pull that runs. It ends when its last client leaves; the next pull of this model continues it.

    steps: what was said last of each file, and of what comes before and after, with the number of that message.
    """

    def __init__(self, given: HubName) -> None:
        self.given = given
        self.steps: dict[str, tuple[int, PullProgress]] = {}
        self.stop = threading.Event()
        self.num_followers = 0
        self.task: asyncio.Task[None] | None = None
        self._count = 0
        self._changed = asyncio.Event()

    async def run(self, threads: ThreadPoolExecutor, token: str | bool | None) -> None:
        """Pull until that is done or was stopped. Raises as `pull`."""
        loop = asyncio.get_running_loop()

        def report(step: PullProgress) -> None:
            loop.call_soon_threadsafe(self._add, step)

        await loop.run_in_executor(threads, pull, self.given, token, report, self.stop)

    def _add(self, step: PullProgress) -> None:
        self._count += 1
        self.steps[step.status] = self._count, step
        self.wake()

    def wake(self) -> None:
        """Have followers look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self) -> AsyncGenerator[PullProgress, None]:
        """Yield all steps, from the beginning; of a file that grows, only how far it is. Raises as `pull`."""
        seen, task = 0, self.task
        assert task is not None
        while True:
            is_done, changed = task.done(), self._changed
            news = sorted(item for item in self.steps.values() if item[0] > seen)
            for number, step in news:
                seen = number
                yield step
            if is_done:
                await asyncio.shield(task)
                return
            await changed.wait()


class Pulls:
    """The pulls of a server, one of each name. token: for the hub."""

    def __init__(self, token: str | bool | None) -> None:
        self._token = token
        self._running: dict[HubName, Pull] = {}
        self._threads = ThreadPoolExecutor(MAX_PULLS, "pull")

    async def follow(self, given: HubName) -> AsyncGenerator[PullProgress, None]:
        """Pull a model, or follow the pull that runs already; yields each step.

        Raises:
            APIError: too many pulls run. Exceptions of `pull`.
        """
        while (running := self._running.get(given)) is not None and running.stop.is_set():
            assert running.task is not None
            await asyncio.wait((running.task,))  # its last client has left, and it is about to end
        if running is None:
            running = self._start(given)
        running.num_followers += 1
        try:
            async for step in running.news():
                yield step
        finally:
            running.num_followers -= 1
            if not running.num_followers:
                running.stop.set()

    def _start(self, given: HubName) -> Pull:
        if len(self._running) >= MAX_PULLS:
            message = f"{MAX_PULLS} models are being pulled; try again when one is done"
            raise APIError(429, message, code="too_many_pulls", headers={"retry-after": str(RETRY_SECONDS)})
        running = Pull(given)
        self._running[given] = running
        running.task = asyncio.get_running_loop().create_task(running.run(self._threads, self._token))
        running.task.add_done_callback(lambda task: self._ended(running, task))
        return running

    def _ended(self, running: Pull, task: asyncio.Task[None]) -> None:
        del self._running[running.given]
        running.wake()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.warning("pull of %s: %s", quoted(str(running.given)), error or type(error).__name__)
        else:
            logger.info("pull of %s: done", quoted(str(running.given)))

    async def close(self) -> None:
        """End all pulls."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for running in self._running.values():
            running.stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown()
