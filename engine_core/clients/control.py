"""The core's side of the calls in `pagewire.ipc.calls`: pausing, sleeping, caches, workers, metrics.

Some of them wait until no step is in flight, or for the workers. Each call is answered exactly once, as soon as its
outcome is known.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagewire.engine_core.adapters import AdapterTable
from pagewire.engine_core.clients import metrics, reports
from pagewire.engine_core.clients.access import may_name_paths
from pagewire.engine_core.clients.block_events import BlockEvents
from pagewire.engine_core.clients.calls import PendingCalls
from pagewire.engine_core.clients.health import Health, report
from pagewire.engine_core.clients.metrics import MeasuredEngine
from pagewire.engine_core.lobby import Lobby
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.workers.group import GroupReply, Outcome
from pagewire.engine_core.workers.stopwatch import Stopwatch
from pagewire.ipc.adapters import AdapterSource
from pagewire.ipc.calls import CALLS, RemoteCall, RunsIn
from pagewire.ipc.errors import EngineBusyError, error_text, error_type
from pagewire.ipc.messages import Call, CallAnswer
from pagewire.ipc.quoting import quoted

logger = logging.getLogger("pagewire.core")

MAX_OPEN_CALLS = 1000  # of one frontend, that are not answered yet

# What the workers give back at each level of sleep. The KV cache is of no use without the weights, so `wake_up`
# takes both for the cache.
GIVEN_BACK = {1: {"kv_cache"}, 2: {"weights", "kv_cache"}}
WOKEN_WITH = {"weights": {"weights"}, "kv_cache": {"weights", "kv_cache"}}


class ControlledEngine(MeasuredEngine, Protocol):
    """The part of the core that `Control` acts on."""

    def deliver(self) -> None:
        """Send each frontend the new tokens and ends of its requests."""

    @property
    def lobby(self) -> Lobby:
        """The sequences that are not scheduled yet."""

    stopwatch: Stopwatch
    block_events: BlockEvents

    @property
    def stopping(self) -> bool:
        """True once the core accepts no new requests."""

    def abort(self, requests: Iterable[Sequence]) -> int:
        """End requests of any frontend. Returns how many."""


@dataclass(frozen=True, slots=True)
class FrontendCall:
    """The frontend that waits for the answer of a call, and its number for the call."""

    identity: bytes
    call_id: int


@dataclass(slots=True)
class Deferred:
    """An action that runs once no step is in flight. `drain`: once all requests have ended as well.

    call: whose time limit applies. since: monotonic time of the call.
    """

    call: RemoteCall
    caller: FrontendCall
    action: Callable[[FrontendCall], None]
    drain: bool
    since: float = field(default_factory=time.monotonic)


class Control:
    """Runs calls, and answers them.

    Attributes:
        asleep: what the workers have given back, of "weights" and "kv_cache"; empty while they are awake.
    """

    def __init__(self, core: ControlledEngine) -> None:
        self._core = core
        self._deferred: list[Deferred] = []
        self._worker_calls = PendingCalls(core.worker)
        self._health: Health[FrontendCall] = Health(core, self._worker_calls, self._answer_health)
        self._num_open: Counter[bytes] = Counter()  # unanswered calls, by frontend
        self._num_memory_calls = 0  # `sleep` and `wake_up` calls that the workers have not answered yet
        self.asleep: set[str] = set()
        self._methods: dict[str, Callable[..., None]] = {
            name: getattr(self, name) for name, call in CALLS.items() if call.runs_in is not RunsIn.WORKER
        }

    @property
    def holds_plans(self) -> bool:
        """True while no step may be launched: the workers sleep or are about to, or an action waits for the last
        step in flight.
        """
        if self.asleep or self._num_memory_calls:
            return True
        return any(not deferred.drain for deferred in self._deferred)

    def call(self, identity: bytes, call: Call) -> None:
        """Check a call and run its method, which answers it then or later. An error is answered at once."""
        caller = FrontendCall(identity, call.call_id)
        self._core.deliver()  # earlier output of requests goes before the answer
        self._num_open[identity] += 1
        try:
            if self._num_open[identity] > MAX_OPEN_CALLS:
                raise EngineBusyError(f"{MAX_OPEN_CALLS} calls of this frontend are not answered yet")
            if call.method not in CALLS:
                raise ValueError(f"no method {quoted(call.method)}; there are {', '.join(sorted(CALLS))}")
            self._core.clients.attached[identity].check_right(CALLS[call.method].right, call.method)
            arguments = CALLS[call.method].receive(call.args, call.kwargs)
            if (method := self._methods.get(call.method)) is not None:
                method(caller, **arguments)
            else:
                self._call_workers(caller, call.method, arguments)
        except Exception as error:  # a caller's mistake must not end the core
            self._refuse(caller, error)

    def advance(self) -> None:
        """Run the deferred actions whose wait is over."""
        if self._core.scheduler.in_flight or not self._deferred:
            return
        self._core.deliver()  # the last output of requests goes before the answer to the call that ended them
        pending, self._deferred = self._deferred, []
        for deferred in pending:
            if deferred.drain and self._core.scheduler.num_unfinished:
                self._deferred.append(deferred)
                continue
            try:
                deferred.action(deferred.caller)
            except Exception as error:
                self._refuse(deferred.caller, error)

    def check_timers(self, now: float) -> None:
        """Answer the calls whose time limit has passed; workers that have not answered are hung, and are killed."""
        step_limit = self._core.stopwatch.limit
        for deferred in list(self._deferred):
            seconds = deferred.call.seconds or step_limit
            if now - deferred.since > seconds:
                self._deferred.remove(deferred)
                text = f"{deferred.call.name}: requests still run after {seconds:g} s"
                self._refuse(deferred.caller, TimeoutError(text))
        if (why := self._worker_calls.expire(now, step_limit)) is not None:
            logger.error("%s; killing the worker", why)
            self._core.worker.kill(why)
        if self._core.adapters is not None and self._core.adapters.memory.loading:
            self._health.probe(now)
        self._health.advance()

    def receive(self, reply: GroupReply) -> None:
        """Answer the call that all workers have answered."""
        self._worker_calls.receive(reply)
        self._health.advance()

    def worker_lost(self, why: str, *, was_ready: bool) -> None:
        """Answer the calls that the lost workers had not answered, or waited for their start, with an error."""
        self._worker_calls.workers_lost(why, were_ready=was_ready)
        self._health.advance()

    def worker_ready(self) -> None:
        """Put new workers to sleep if the lost ones slept, then send the calls that have waited for them."""

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                logger.error("the new worker does not sleep as the lost one did: %s", outcome)

        if self.asleep:
            level = min(level for level, parts in GIVEN_BACK.items() if self.asleep <= parts)
            self._worker_calls.call_first("sleep", {"level": level}, done)
        self._worker_calls.workers_ready()

    # ------------------------------------------------------------ methods, as `CALLS` declares them

    def reset_prefix_cache(self, caller: FrontendCall, reset_running_requests: bool) -> None:
        """Forget cached prefixes; with `reset_running_requests` preempt what uses them. Answers success."""
        if not reset_running_requests:
            return self._reply(caller, self._core.scheduler.reset_prefix_cache())

        def reset(caller: FrontendCall) -> None:
            self._core.scheduler.preempt_all()
            self._reply(caller, self._core.scheduler.reset_prefix_cache())

        self._deferred.append(Deferred(CALLS["reset_prefix_cache"], caller, reset, drain=False))

    def pause(self, caller: FrontendCall, wait_for_inflight_requests: bool, clear_cache: bool) -> None:
        """Hold new requests back; answers True once all others have ended, by themselves or by an abort.

        A `resume` that comes first ends the wait: the answer is False, and nothing is reset.
        """
        self._core.lobby.hold()
        if not wait_for_inflight_requests:
            core, held = self._core, set(self._core.lobby)
            core.abort(request for _, request in core.requests() if request not in held)

        def paused(caller: FrontendCall) -> None:
            if clear_cache:
                self._core.scheduler.reset_prefix_cache()
            self._reply(caller, True)

        self._deferred.append(Deferred(CALLS["pause"], caller, paused, drain=True))

    def resume(self, caller: FrontendCall) -> None:
        """Admit the requests that were held back, and new ones; end the pauses that still wait."""
        self._core.lobby.release()
        for deferred in self._deferred:
            if deferred.drain:
                self._reply(deferred.caller, False)
        self._deferred = [deferred for deferred in self._deferred if not deferred.drain]
        self._reply(caller, None)

    def fence(self, caller: FrontendCall) -> None:
        """Answer: the requests before it are taken, since the call waited for them."""
        self._reply(caller, None)

    def is_paused(self, caller: FrontendCall) -> None:
        """Answer whether new requests are held back."""
        self._reply(caller, self._core.lobby.held)

    def abort_request(self, caller: FrontendCall, request_id: str, frontend: int | None) -> None:
        """End the requests with this id: those of the frontend with this number, or of any. Answers how many
        sequences that ended.
        """
        matching = [
            request
            for client, request in self._core.requests()
            if request.request_id == request_id and frontend in (None, client.number)
        ]
        self._reply(caller, self._core.abort(matching))

    def sleep(self, caller: FrontendCall, level: int) -> None:
        """Let the workers give memory back; if one fails, what it still holds is unknown, and all are replaced.

        Raises:
            EngineBusyError: requests are unfinished.
        """
        if self._core.scheduler.num_unfinished:
            raise EngineBusyError(f"{self._core.scheduler.num_unfinished} requests are unfinished")

        def done(outcome: Outcome) -> None:
            self._num_memory_calls -= 1
            if isinstance(outcome, Exception):
                self._core.worker.kill()
                return self._refuse(caller, outcome)
            self.asleep |= GIVEN_BACK[level]
            self._core.scheduler.reset_prefix_cache()
            self._reply(caller, None)

        self._worker_calls.call("sleep", {"level": level}, done)
        self._num_memory_calls += 1

    def wake_up(self, caller: FrontendCall, tags: list[str] | None) -> None:
        """Let the workers take memory again; after an error it still counts as asleep.

        Raises:
            ValueError: an unknown tag, or an empty list.
        """
        names = WOKEN_WITH.keys() if tags is None else set(tags)
        if not names or names - WOKEN_WITH.keys():
            raise ValueError(f"wake_up: tags must name weights, kv_cache or both, got {tags}")

        def done(outcome: Outcome) -> None:
            self._num_memory_calls -= 1
            if isinstance(outcome, Exception):
                return self._refuse(caller, outcome)
            self.asleep.difference_update(*(WOKEN_WITH[name] for name in names))
            self._reply(caller, None)

        if not (self.asleep or self._num_memory_calls):
            return self._reply(caller, None)
        self._worker_calls.call("wake_up", {"tags": tags}, done)
        self._num_memory_calls += 1

    def is_sleeping(self, caller: FrontendCall) -> None:
        """Answer whether the workers have given memory back, and not taken all of it again."""
        self._reply(caller, bool(self.asleep))

    def collective_rpc(
        self, caller: FrontendCall, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None:
        """Call a method of every worker; answers the list of results.

        Raises:
            ValueError: a method in which the core takes part, such as `sleep`.
        """
        if (declared := CALLS.get(method)) is not None and declared.runs_in is RunsIn.BOTH:
            raise ValueError(f"collective_rpc: the core takes part in {method}: call {method} itself")
        self._call_workers(caller, method, kwargs or {}, args)

    def check_health(self, caller: FrontendCall) -> None:
        """Answer whether the workers are proven to live, and whether the engine takes requests."""
        self._health.check(caller)

    def metrics(self, caller: FrontendCall) -> None:
        """Answer the value of every metric."""
        self._reply(caller, metrics.snapshot(self._core))

    def status(self, caller: FrontendCall) -> None:
        """Answer the core's state."""
        self._reply(caller, reports.status(self._core))

    def requests(self, caller: FrontendCall, limit: int) -> None:
        """Answer a list of at most `limit` unfinished sequences, of all frontends."""
        self._reply(caller, reports.requests(self._core, limit))

    def follow_blocks(self, caller: FrontendCall) -> None:
        """Answer whether the names of cached blocks follow, after a snapshot of them."""
        follows = self._core.config.args.enable_prefix_caching
        if follows:
            self._core.block_events.follow(self._core.clients.attached[caller.identity])
        self._reply(caller, follows)

    # ------------------------------------------------------------ adapters

    def register_adapter(
        self, caller: FrontendCall, name: str, adapter_id: int, path: str, version: str
    ) -> None:
        """Read an adapter, and register it under its name; answers True once that is done.

        Raises:
            ValueError: no adapters are served, it has no path, or its id is that of another name.
            PermissionError: this frontend may not name paths.
        """
        client = self._core.clients.attached[caller.identity]
        if not may_name_paths(client.peer, client.rights):
            raise PermissionError(
                "only frontends of the engine's own user that attach over ipc:// may name the paths of adapters"
            )
        if not path:
            raise ValueError("register_adapter: give the path of the adapter's folder")
        source = AdapterSource(name, adapter_id, path, version)
        self._adapters().register(source, time.monotonic(), self._answer_when_resident(caller))

    def remove_lora(self, caller: FrontendCall, lora_id: int) -> None:
        """Unload an adapter once its requests have ended; answers whether there is one with this id."""
        self._reply(caller, self._adapters().remove(lora_id))

    def pin_lora(self, caller: FrontendCall, lora_id: int) -> None:
        """Keep an adapter in memory; answers True once it is there."""
        self._adapters().pin(lora_id, time.monotonic(), self._answer_when_resident(caller))

    def list_loras(self, caller: FrontendCall) -> None:
        """Answer the ids of the adapters that are registered or in memory."""
        self._reply(caller, self._adapters().ids())

    def adapters(self, caller: FrontendCall) -> None:
        """Answer the registered adapters."""
        self._reply(caller, reports.adapters(self._adapters()))

    def _adapters(self) -> AdapterTable:
        if self._core.adapters is None:
            raise ValueError("this engine serves no adapters: start it with enable_lora")
        return self._core.adapters

    def _answer_when_resident(self, caller: FrontendCall) -> Callable[[Exception | None], None]:
        def done(error: Exception | None) -> None:
            if error is None:
                self._reply(caller, True)
            else:
                self._refuse(caller, error)

        return done

    # ------------------------------------------------------------ answers

    def _call_workers(
        self, caller: FrontendCall, method: str, kwargs: dict[str, Any], args: Iterable[Any] = ()
    ) -> None:
        """Call a method of every worker; the caller gets the list of their results."""

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                self._refuse(caller, outcome)
            else:
                self._reply(caller, outcome)

        self._worker_calls.call(method, kwargs, done, args)

    def _reply(self, caller: FrontendCall, result: Any) -> None:
        self._send(caller, CallAnswer(caller.call_id, result))

    def _refuse(self, caller: FrontendCall, error: Exception) -> None:
        self._send(caller, CallAnswer(caller.call_id, error=error_text(error), error_type=error_type(error)))

    def _answer_health(self, caller: FrontendCall, problem: str | None) -> None:
        obstacles = {
            "the engine is shutting down": self._core.stopping,
            "the engine sleeps": bool(self.asleep or self._num_memory_calls),
            "the engine is paused": self._core.lobby.held,
        }
        obstacle = next((text for text, applies in obstacles.items() if applies), None)
        self._reply(caller, report(problem, obstacle))

    def _send(self, caller: FrontendCall, reply: CallAnswer) -> None:
        self._num_open[caller.identity] -= 1
        if not self._num_open[caller.identity]:
            del self._num_open[caller.identity]
        self._core.clients.answer(caller.identity, reply)
