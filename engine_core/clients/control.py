"""Methods that a frontend may call by name: pausing, sleeping, caches, workers, metrics.

Some must wait until nothing is in flight, or for the worker: each call is answered once, whenever its
outcome is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from pagewire.engine_core.clients import metrics, reports
from pagewire.engine_core.clients.metrics import MeasuredEngine
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.messages import Call, CallAnswer, WorkerCall, WorkerReply


class ControlledEngine(MeasuredEngine, Protocol):
    """The part of the core that its methods act on."""

    def deliver(self) -> None:
        """Send frontends what their requests gave."""

    def admit_held(self) -> None:
        """Let requests that were held back wait for their turn."""

    def abort(self, requests: Iterable[Sequence]) -> int:
        """End requests, whosever they are. Returns how many."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who waits for the answer of a call."""

    identity: bytes
    call_id: int


@dataclass(slots=True)
class Deferred:
    """An action for when no step is in flight. `drain`: not before all requests have ended, either."""

    caller: Caller
    action: Callable[[Caller], None]
    drain: bool


class Control:
    """The core's methods. `paused` holds new requests back; `asleep`: the worker gave its memory up."""

    def __init__(self, core: ControlledEngine) -> None:
        self._core = core
        self._deferred: list[Deferred] = []
        self._worker_calls: dict[int, tuple[Caller, Callable[[Any], Any]]] = {}
        self._call_ids = count()
        self.paused = False
        self.asleep = False
        self._calls: dict[str, Callable[..., None]] = {
            "reset_prefix_cache": self.reset_prefix_cache,
            "pause": self.pause,
            "resume": self.resume,
            "is_paused": lambda caller: self._reply(caller, self.paused),
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "abort_request": self.abort_request,
            "is_sleeping": lambda caller: self._reply(caller, self.asleep),
            "collective_rpc": self.collective_rpc,
            "start_profile": lambda caller: self.collective_rpc(caller, "start_profile"),
            "stop_profile": lambda caller: self.collective_rpc(caller, "stop_profile"),
            "metrics": lambda caller: self._reply(caller, metrics.snapshot(core)),
            "status": lambda caller: self._reply(caller, reports.status(core)),
            "requests": self.requests,
        }

    @property
    def holds_plans(self) -> bool:
        """True while no step may be launched: asleep, or until what is in flight has returned."""
        return self.asleep or any(not deferred.drain for deferred in self._deferred)

    def call(self, identity: bytes, call: Call) -> None:
        """Run a method, which answers in its own time. Errors are answered at once."""
        caller = Caller(identity, call.call_id)
        method = self._calls.get(call.method)
        self._core.deliver()  # what requests gave comes before the answer
        try:
            if method is None:
                raise ValueError(f"no method {call.method!r}; there are {', '.join(sorted(self._calls))}")
            method(caller, *call.args, **call.kwargs)
        except Exception as error:  # a caller's mistake must not end the core
            self._refuse(caller, error)

    def advance(self) -> None:
        """Run deferred actions whose time has come."""
        if self._core.scheduler.in_flight or not self._deferred:
            return
        self._core.deliver()  # what requests gave comes before the answer to the call that ended them
        pending, self._deferred = self._deferred, []
        for deferred in pending:
            if deferred.drain and self._core.scheduler.num_unfinished:
                self._deferred.append(deferred)
                continue
            try:
                deferred.action(deferred.caller)
            except Exception as error:
                self._refuse(deferred.caller, error)

    def hear(self, reply: WorkerReply) -> None:
        """The worker has answered."""
        caller, finish = self._worker_calls.pop(reply.call_id)
        if reply.error is not None:
            kind = reply.error_type or "RuntimeError"
            self._send(caller, CallAnswer(caller.call_id, error=reply.error, error_type=kind))
        else:
            self._reply(caller, finish(reply.result))

    def worker_lost(self, why: str) -> None:
        """The worker will not answer any more. A new one is awake."""
        self.asleep = False
        lost, self._worker_calls = self._worker_calls, {}
        for caller, _ in lost.values():
            self._refuse(caller, RuntimeError(f"the worker was lost: {why}"))

    # ------------------------------------------------------------ methods

    def reset_prefix_cache(self, caller: Caller, reset_running_requests: bool = False) -> None:
        """Forget cached prefixes; with `reset_running_requests` preempt what uses them. Answers success."""
        if not reset_running_requests:
            return self._reply(caller, self._core.scheduler.reset_prefix_cache())

        def reset(caller: Caller) -> None:
            self._core.scheduler.preempt_all()
            self._reply(caller, self._core.scheduler.reset_prefix_cache())

        self._deferred.append(Deferred(caller, reset, drain=False))

    def pause(
        self, caller: Caller, wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Hold new requests back, and end the others: by waiting for them, or with reason "abort"."""
        self.paused = True
        if not wait_for_inflight_requests:
            core, held = self._core, set(self._core.held)
            core.abort(request for _, request in core.requests() if request not in held)

        def paused(caller: Caller) -> None:
            if clear_cache:
                self._core.scheduler.reset_prefix_cache()
            self._reply(caller, None)

        self._deferred.append(Deferred(caller, paused, drain=True))

    def resume(self, caller: Caller) -> None:
        """Let held requests in, and new ones."""
        self.paused = False
        self._core.admit_held()
        self._reply(caller, None)

    def abort_request(self, caller: Caller, request_id: str, frontend: int | None = None) -> None:
        """End the requests of this public id, those of one frontend (its `Client.number`) or of any.

        Their frontends get the finish reason "abort". Answers how many sequences that ended; 0: there is no
        such request, or it has ended.
        """
        found = [
            request
            for client, request in self._core.requests()
            if request.request_id == request_id and frontend in (None, client.number)
        ]
        self._reply(caller, self._core.abort(found))

    def requests(self, caller: Caller, limit: int = 1000) -> None:
        """Answer a list of at most `limit` unfinished sequences, of all frontends."""
        self._reply(caller, reports.requests(self._core, limit))

    def sleep(self, caller: Caller, level: int = 1) -> None:
        """Give memory back: level 1 the KV cache, level 2 the weights as well.

        Raises:
            ValueError: another level. EngineBusyError: requests are unfinished.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2, got {level!r}")
        if self._core.scheduler.num_unfinished:
            raise EngineBusyError(f"{self._core.scheduler.num_unfinished} requests are unfinished")

        def asleep(result: Any) -> None:
            self._core.scheduler.reset_prefix_cache()

        self.asleep = True
        self._ask_worker(caller, "sleep", [level], {}, asleep)

    def wake_up(self, caller: Caller, tags: list[str] | None = None) -> None:
        """Take the memory again."""

        def awake(result: Any) -> None:
            self.asleep = False

        if not self.asleep:
            return self._reply(caller, None)
        self._ask_worker(caller, "wake_up", [] if tags is None else [tags], {}, awake)

    def collective_rpc(
        self, caller: Caller, method: str, args: list[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> None:
        """Call a method of every worker; answers the list of results."""
        self._ask_worker(caller, method, list(args or []), dict(kwargs or {}), lambda result: [result])

    # ------------------------------------------------------------ answers

    def _ask_worker(
        self,
        caller: Caller,
        method: str,
        args: list[Any],
        kwargs: dict[str, Any],
        finish: Callable[[Any], Any],
    ) -> None:
        call_id = next(self._call_ids)
        self._worker_calls[call_id] = (caller, finish)
        self._core.worker.send(WorkerCall(call_id, method, args, kwargs))

    def _reply(self, caller: Caller, result: Any) -> None:
        self._send(caller, CallAnswer(caller.call_id, result))

    def _refuse(self, caller: Caller, error: Exception) -> None:
        self._send(caller, CallAnswer(caller.call_id, error=str(error), error_type=type(error).__name__))

    def _send(self, caller: Caller, reply: CallAnswer) -> None:
        self._core.clients.answer(caller.identity, reply)
