"""The core's side of the calls in `pagewire.ipc.wire.calls`: pausing, sleeping, caches, workers, metrics.

Some of them wait until no step is in flight, or for the workers. Each call is answered exactly once, as soon as its
outcome is known.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagewire.engine_core.admission.lobby import Lobby
from pagewire.engine_core.calls.adapter_control import AdapterControl
from pagewire.engine_core.calls.frontend_call import FrontendCall
from pagewire.engine_core.calls.health import Health, report
from pagewire.engine_core.calls.media_control import MediaControl
from pagewire.engine_core.calls.peer_control import PeerControl
from pagewire.engine_core.calls.retention_control import RetentionControl
from pagewire.engine_core.calls.weight_updates import WeightUpdates
from pagewire.engine_core.calls.worker_calls import PendingCalls
from pagewire.engine_core.calls.worker_sleep import WorkerSleep
from pagewire.engine_core.clients.requests import EngineRequests
from pagewire.engine_core.events.block_events import BlockEvents
from pagewire.engine_core.metrics import metrics, reports
from pagewire.engine_core.metrics.metrics import MeasuredEngine
from pagewire.engine_core.wings.wing import Wing
from pagewire.engine_core.workers.group import GroupReply
from pagewire.engine_core.workers.supervisor import WorkerSupervisor
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.calls import CALLS, RemoteCall, RunsIn
from pagewire.ipc.wire.messages import Call, CallAnswer
from pagewire.ipc.wire.worker_messages import Ready

logger = logging.getLogger("pagewire.core")

MAX_OPEN_CALLS = 1000  # of one frontend, that are not answered yet


class ControlledEngine(MeasuredEngine, Protocol):
    """The part of the core that `Control` acts on."""

    @property
    def lobby(self) -> Lobby:
        """The sequences that are not scheduled yet."""

    supervisor: WorkerSupervisor
    block_events: BlockEvents
    calls: PendingCalls
    weights: WeightUpdates

    @property
    def sleep(self) -> WorkerSleep:
        """What the workers have given back."""

    @property
    def requests(self) -> EngineRequests:
        """The unfinished requests of all frontends."""

    @property
    def stopping(self) -> bool:
        """True once the core accepts no new requests."""


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


class Control(Wing):
    """Runs the calls of frontends itself, but those of `WorkerSleep` and of the controls of one feature."""

    def __init__(self, core: ControlledEngine) -> None:
        self._core = core
        self._deferred: list[Deferred] = []
        self._worker_calls, self._sleep = core.calls, core.sleep
        self._health: Health[FrontendCall] = Health(core, self._worker_calls, self._answer_health)
        self._num_open: Counter[bytes] = Counter()  # unanswered calls, by frontend
        features = (
            AdapterControl(core),
            MediaControl(core),
            RetentionControl(core),
            PeerControl(core),
            core.weights,
        )
        owners = (self, self._sleep, *features)
        self._methods: dict[str, Callable[..., None]] = {
            name: next(getattr(owner, name) for owner in owners if hasattr(owner, name))
            for name, call in CALLS.items()
            if call.runs_in is not RunsIn.WORKER
        }

    @property
    def holds_steps(self) -> bool:
        """True while no step may be launched: an action waits for the last step in flight."""
        return any(not deferred.drain for deferred in self._deferred)

    @property
    def awaits_workers(self) -> bool:
        """True if calls wait for workers."""
        return self._worker_calls.num_unsent > 0

    def call(self, identity: bytes, call: Call) -> None:
        """Check a call and run its method, which answers it then or later. An error is answered at once."""
        caller = FrontendCall(identity, call.call_id, self._send)
        self._core.requests.deliver()  # earlier output of requests goes before the answer
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
                self._sleep.check_workers(call.method)
                self._worker_calls.call(call.method, arguments, caller.end)
        except Exception as error:  # a caller's mistake must not end the core
            caller.refuse(error)

    def advance(self) -> None:
        """Run the deferred actions whose wait is over."""
        if self._core.scheduler.in_flight or not self._deferred:
            return
        self._core.requests.deliver()  # the last output of requests goes before the answer to what ended them
        pending, self._deferred = self._deferred, []
        for deferred in pending:
            if deferred.drain and self._core.scheduler.num_unfinished:
                self._deferred.append(deferred)
                continue
            try:
                deferred.action(deferred.caller)
            except Exception as error:
                deferred.caller.refuse(error)

    def check_timers(self, now: float) -> None:
        """Answer the calls whose time limit has passed; workers that have not answered are hung, and are killed."""
        step_limit = self._core.supervisor.stopwatch.limit
        for deferred in list(self._deferred):
            seconds = deferred.call.seconds or step_limit
            if now - deferred.since > seconds:
                self._deferred.remove(deferred)
                text = f"{deferred.call.name}: requests still run after {seconds:g} s"
                deferred.caller.refuse(TimeoutError(text))
        if (why := self._worker_calls.expire(now, step_limit)) is not None:
            logger.error("%s; killing the worker", why)
            self._core.worker.kill(why)
        if self._core.adapters is not None and self._core.adapters.memory.loading:
            self._health.probe(now)
        self._health.advance()

    def receive(self, message: Any) -> bool:
        """Answer the call that all workers have answered."""
        if not isinstance(message, GroupReply):
            return False
        self._worker_calls.receive(message)
        self._health.advance()
        return True

    def worker_lost(self, why: str, *, was_ready: bool) -> None:
        """Answer the calls that the lost workers had not answered, or waited for their start, with an error."""
        self._worker_calls.workers_lost(why, were_ready=was_ready)
        self._health.advance()

    def start_failed(self, why: str) -> None:
        """Answer the calls that have waited for workers with an error."""
        self.worker_lost(why, was_ready=False)

    def worker_ready(self, ready: Ready) -> None:
        """Send the calls that have waited for them."""
        self._worker_calls.workers_ready()

    # ------------------------------------------------------------ methods, as `CALLS` declares them

    def reset_prefix_cache(self, caller: FrontendCall, reset_running_requests: bool) -> None:
        """Forget cached prefixes; with `reset_running_requests` preempt what uses them. Answers success."""
        if not reset_running_requests:
            return caller.reply(self._forget_prefixes())

        def reset(caller: FrontendCall) -> None:
            self._core.scheduler.preempt_all()
            caller.reply(self._forget_prefixes())

        self._deferred.append(Deferred(CALLS["reset_prefix_cache"], caller, reset, drain=False))

    def pause(self, caller: FrontendCall, wait_for_inflight_requests: bool, clear_cache: bool) -> None:
        """Hold new requests back; answers True once all others have ended, by themselves or by an abort.

        A `resume` that comes first ends the wait: the answer is False, and nothing is reset.
        """
        self._core.lobby.hold()
        if not wait_for_inflight_requests:
            core, held = self._core, set(self._core.lobby)
            core.requests.abort(request for _, request in core.requests if request not in held)

        def paused(caller: FrontendCall) -> None:
            if clear_cache:
                self._forget_prefixes()
            caller.reply(True)

        self._deferred.append(Deferred(CALLS["pause"], caller, paused, drain=True))

    def resume(self, caller: FrontendCall) -> None:
        """Admit the requests that were held back, and new ones; end the pauses that still wait."""
        self._core.lobby.release()
        for deferred in self._deferred:
            if deferred.drain:
                deferred.caller.reply(False)
        self._deferred = [deferred for deferred in self._deferred if not deferred.drain]
        caller.reply(None)

    def fence(self, caller: FrontendCall) -> None:
        """Answer: the requests before it are taken, since the call waited for them."""
        caller.reply(None)

    def is_paused(self, caller: FrontendCall) -> None:
        """Answer whether new requests are held back."""
        caller.reply(self._core.lobby.held)

    def abort_request(self, caller: FrontendCall, request_id: str, frontend: int | None) -> None:
        """End the requests with this id: those of the frontend with this number, or of any. Answers how many
        sequences that ended.
        """
        matching = [
            request
            for client, request in self._core.requests
            if request.request_id == request_id and frontend in (None, client.number)
        ]
        caller.reply(self._core.requests.abort(matching))

    def collective_rpc(
        self, caller: FrontendCall, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None:
        """Call a method of every worker; answers the list of results.

        Raises:
            ValueError: a method in which the core takes part, such as `sleep`. EngineAsleepError: no workers run.
        """
        if (declared := CALLS.get(method)) is not None and declared.runs_in is RunsIn.BOTH:
            raise ValueError(f"collective_rpc: the core takes part in {method}: call {method} itself")
        self._sleep.check_workers(method)
        self._worker_calls.call(method, kwargs or {}, caller.end, args)

    def check_health(self, caller: FrontendCall) -> None:
        """Answer whether the workers are proven to live, and whether the engine takes requests."""
        self._health.check(caller)

    def metrics(self, caller: FrontendCall) -> None:
        """Answer the value of every metric."""
        caller.reply(metrics.snapshot(self._core))

    def status(self, caller: FrontendCall) -> None:
        """Answer the core's state."""
        caller.reply(reports.status(self._core))

    def requests(self, caller: FrontendCall, limit: int) -> None:
        """Answer a list of at most `limit` unfinished sequences, of all frontends."""
        caller.reply(reports.requests(self._core, limit))

    def follow_blocks(self, caller: FrontendCall) -> None:
        """Answer whether the names of cached blocks follow, after a snapshot of them."""
        follows = self._core.config.args.enable_prefix_caching
        if follows:
            self._core.block_events.follow(self._core.clients.attached[caller.identity])
        caller.reply(follows)

    def _forget_prefixes(self) -> bool:
        """Drop all cached prefixes, those on disk too. Returns False, and does nothing, while sequences run."""
        if not self._core.scheduler.reset_prefix_cache():
            return False
        if self._core.tier is not None:
            self._core.tier.forget()
        return True

    # ------------------------------------------------------------ answers

    def _answer_health(self, caller: FrontendCall, problem: str | None) -> None:
        obstacles = {
            "the engine is shutting down": self._core.stopping,
            "the engine sleeps": self._sleep.holds_steps,
            "the engine is paused": self._core.lobby.held,
        }
        obstacle = next((text for text, applies in obstacles.items() if applies), None)
        caller.reply(report(problem, obstacle))

    def _send(self, identity: bytes, answer: CallAnswer) -> None:
        self._num_open[identity] -= 1
        if not self._num_open[identity]:
            del self._num_open[identity]
        self._core.clients.answer(identity, answer)
