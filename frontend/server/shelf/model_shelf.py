"""Models that start at the first request for them, and end when they are idle: the table, with threads and timers.

use --> ticket --> grant --> release          (the event loop; `table.py` decides)
          |
          +--> measure, start, stop           (threads: each blocks for seconds)
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pagewire.frontend.server.http.errors import NO_RETRY, APIError
from pagewire.frontend.server.shelf.table import LOADED, Action, ActionKind, ModelState, ShelfTable
from pagewire.ipc.quoting import quoted

logger = logging.getLogger("pagewire.server")

T = TypeVar("T")

NUM_THREADS = 8  # starts, ends and measurements at a time
RETRY_AFTER_SECONDS = 2


class MemoryEstimate(NamedTuple):
    """The needs of a model, known before it is loaded.

    problem: why it cannot be loaded at all; None: it can. changes: options with which it fits, by name (`--fit`).
    fitted: what these are, in a line.
    """

    need: int
    problem: str | None = None
    changes: Mapping[str, Any] | None = None
    fitted: str | None = None


class ModelLoader(Protocol[T]):
    """Starts and ends models. Its methods block; they are called in threads, but for `gone`."""

    def measure(self, name: str) -> MemoryEstimate:
        """Estimate the memory that a model needs. Raises any exception."""

    def start(self, name: str) -> T:
        """Start a model, and wait until it is ready. Raises any exception."""

    def stop(self, loaded: T) -> None:
        """End a model, and wait until its processes have ended."""

    def rest(self, name: str, loaded: T) -> None:
        """End a model whose requests have ended, or let it sleep until the next `start`."""

    def forget(self, name: str) -> None:
        """End a model that sleeps, if it does: it will not be started again."""

    def close(self) -> None:
        """End all models that sleep."""

    def gone(self, loaded: T) -> Future[Any]:
        """Done when the model is lost; cancelled when it was stopped."""


class ModelShelf(Generic[T]):
    """The models of a server, of which as many are loaded as fit. For one event loop.

    waits: requests wait for a model that starts; else they are refused, and told to come again.
    """

    def __init__(self, table: ShelfTable, loader: ModelLoader[T], waits: bool = True) -> None:
        self.table, self._loader, self._waits = table, loader, waits
        self.loaded: dict[str, T] = {}
        self.problems: dict[str, str] = {}
        """Why a model did not start when it was last tried, by its name."""
        self._tickets: dict[str, deque[asyncio.Future[int]]] = {name: deque() for name in table.entries}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "shelf")
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    @asynccontextmanager
    async def use(self, name: str) -> AsyncGenerator[T, None]:
        """Use a model, which does not end meanwhile; wait until it is loaded.

        Raises:
            APIError: it does not fit or did not start, or (where requests do not wait) it is not ready yet.
        """
        generation = await self._entered(name)
        try:
            if name not in self.loaded or self.table.entries[name].generation != generation:
                raise did_not_start(name, "its core was lost at once")
            yield self.loaded[name]
        finally:
            self._leave(name, generation)

    def hold(self, name: str) -> Callable[[Any], None]:
        """Use a model that is used already for longer than that; returns what ends it, and ignores its argument."""
        generation = self.table.hold(name)
        return lambda _: self._leave(name, generation)

    def add(self, name: str) -> None:
        """Add a model, which is not loaded yet."""
        self.table.add(name)
        self._tickets.setdefault(name, deque())

    def forget(self, name: str, error: APIError) -> None:
        """End a model once its requests have ended, and forget it. error: for those that wait for it."""
        self.table.forget(name)
        self._refuse(name, error)
        self._turn()

    def unload(self, name: str) -> None:
        """End a model as soon as no request uses it; do not wait for that."""
        if self.table.entries[name].state in LOADED:
            self.keep(name, 0.0)

    def keep(self, name: str, seconds: float | None) -> None:
        """Set for how long a model stays when it is idle next; None: as long as others."""
        self.table.keep(name, seconds)
        self._turn()

    async def close(self) -> None:
        """End all models; requests that wait get an error."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for name in self._tickets:
            self._refuse(name, APIError(503, "the server is shutting down", code="shutting_down"))
        while self._tasks:
            await asyncio.wait(self._tasks)
        loop = asyncio.get_running_loop()
        models, self.loaded = list(self.loaded.values()), {}
        await asyncio.gather(
            loop.run_in_executor(self._threads, self._loader.close),
            *(loop.run_in_executor(self._threads, self._loader.stop, model) for model in models),
        )
        self._threads.shutdown()

    # -------------------------------------------------------------- requests

    async def _entered(self, name: str) -> int:
        """Enter a model: the generation of the use. Raises as `use`."""
        if self._closing:
            raise APIError(503, "the server is shutting down", code="shutting_down")
        if not self._waits and not self.table.may_enter(name):
            if (problem := self.problems.pop(name, None)) is not None:
                raise APIError(
                    503, problem, code="model_not_started", headers=NO_RETRY
                )  # once, to one client
            self.table.ask(name, waits=False)
            self._turn()
            raise self._not_yet(name)
        ticket: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.table.ask(name)
        self._tickets[name].append(ticket)
        self._turn()
        try:
            return await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self._leave(name, ticket.result())
            elif ticket in self._tickets[name]:
                self._tickets[name].remove(ticket)
                self.table.withdraw(name)
                self._turn()
            raise

    def _leave(self, name: str, generation: int) -> None:
        self.table.release(name, generation, time.monotonic())
        self._turn()

    def _refuse(self, name: str, error: APIError) -> None:
        """Tell all who wait for a model why they do so in vain."""
        tickets = self._tickets[name]
        while tickets:
            self.table.withdraw(name)
            ticket = tickets.popleft()
            if not ticket.done():
                ticket.set_exception(error)

    def _not_yet(self, name: str) -> APIError:
        state = self.table.entries[name].state.value
        return APIError(
            503,
            f"the model {quoted(name)} is not ready ({state}); try again, or start the server with "
            "--while-starting wait",
            code="model_not_ready",
            headers={"retry-after": str(RETRY_AFTER_SECONDS)},
        )

    # ----------------------------------------------------------------- turns

    def _turn(self) -> None:
        """Let requests in that may enter, do what the table decides, and set the timer again."""
        if self._closing:
            return
        self._let_in()
        while (action := self.table.next_action(time.monotonic())) is not None:
            self._act(action)
        self._let_in()  # whom a model that yielded need not keep out any more
        for name in self.table.take_out():
            del self._tickets[name]
            self.problems.pop(name, None)
            self._begin(asyncio.to_thread(self._loader.forget, name))
        self._set_timer()

    def _let_in(self) -> None:
        for name, tickets in self._tickets.items():
            while tickets and self.table.may_enter(name):
                ticket = tickets.popleft()
                if ticket.done():  # cancelled, by a client that has left just now
                    self.table.withdraw(name)
                else:
                    ticket.set_result(self.table.grant(name))

    def _act(self, action: Action) -> None:
        kind, name = action
        if kind is ActionKind.REFUSE:
            text = f"the model {quoted(name)} does not fit beside the models that stay loaded (--pin)"
            self._refuse(name, does_not_fit(text))
            return
        steps = {
            ActionKind.MEASURE: self._measure,
            ActionKind.START: self._start,
            ActionKind.STOP: self._stop,
        }
        self._begin(steps[kind](name))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task, for which `close` waits."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        end = min(map(self.table.expires_at, self.table.entries.values()), default=math.inf)
        if end < math.inf:
            delay = max(0.0, end - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._turn)

    # --------------------------------------------------------------- actions

    async def _measure(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            estimate = await loop.run_in_executor(self._threads, self._loader.measure, name)
        except Exception as error:
            self._failed(name, error)
            return
        if estimate.problem is not None:
            self._give_up(name, does_not_fit(f"the model {quoted(name)} does not fit: {estimate.problem}"))
            return
        self.table.measured(name, estimate.need)
        self._turn()

    async def _start(self, name: str) -> None:
        loop, began = asyncio.get_running_loop(), time.monotonic()
        logger.info("model %s: starting", quoted(name))
        try:
            model = await loop.run_in_executor(self._threads, self._loader.start, name)
        except Exception as error:
            self._failed(name, error)
            return
        self.loaded[name] = model
        self.problems.pop(name, None)
        self.table.started(name, time.monotonic())
        logger.info("model %s: ready after %.1f s", quoted(name), time.monotonic() - began)
        generation = self.table.entries[name].generation
        self._loader.gone(model).add_done_callback(partial(self._report_loss, loop, name, generation))
        self._turn()

    async def _stop(self, name: str) -> None:
        logger.info("model %s: stopping", quoted(name))
        model = self.loaded.pop(name)
        leaves = self.table.entries[name].leaves
        end = partial(self._loader.stop, model) if leaves else partial(self._loader.rest, name, model)
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, end)
        except Exception:
            logger.exception("model %s: its end failed", quoted(name))
        self.table.stopped(name)
        self._turn()

    def _failed(self, name: str, error: Exception) -> None:
        logger.error("model %s did not start: %s", quoted(name), error)
        self._give_up(name, did_not_start(name, str(error)))

    def _give_up(self, name: str, error: APIError) -> None:
        self.problems[name] = error.message
        self.table.failed(name)
        self._refuse(name, error)
        self._turn()

    def _report_loss(
        self, loop: asyncio.AbstractEventLoop, name: str, generation: int, gone: Future[Any]
    ) -> None:
        """Have the loop deal with the loss of a core; called in any thread."""
        if not gone.cancelled() and not loop.is_closed():
            loop.call_soon_threadsafe(self._lose, name, generation, gone.result())

    def _lose(self, name: str, generation: int, error: Any) -> None:
        entry = self.table.entries.get(name)
        if entry is None or self._closing or entry.generation != generation or entry.state not in LOADED:
            return
        logger.error("model %s: %s; the next request starts it again", quoted(name), error)
        self.table.lost(name)
        self._act(Action(ActionKind.STOP, name))
        self._turn()

    def state(self, name: str) -> ModelState:
        """The state of a model."""
        return self.table.entries[name].state


def does_not_fit(message: str) -> APIError:
    """The error for a model that is too large."""
    return APIError(503, message, code="model_does_not_fit", headers=NO_RETRY)


def did_not_start(name: str, problem: str) -> APIError:
    """The error for a model that did not start, or of which the size is not known."""
    return APIError(
        503, f"the model {quoted(name)} did not start: {problem}", code="model_not_started", headers=NO_RETRY
    )
