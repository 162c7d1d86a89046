"""The core's side of the calls in `pagewire.ipc.calls`: pausing, sleeping, caches, workers, metrics.

Some of them wait until no step is in flight, or for the worker. Each call is answered exactly once, as soon as its
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
from pagewire.ipc.calls import CALLS, RunsIn
from pagewire.ipc.errors import EngineBusyError, error_text, error_type
from pagewire.ipc.messages import Call, CallAnswer, WorkerCall, WorkerReply


class ControlledEngine(MeasuredEngine, Protocol):
    """The part of the core that `Control` acts on."""

    def deliver(self) -> None:
        """Send each frontend the new tokens and ends of its requests."""

    def admit_held(self) -> None:
        """Hand the requests that were held back to the scheduler."""

    def abort(self, requests: Iterable[Sequence]) -> int:
        """End requests of any frontend. Returns how many."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The frontend that waits for the answer of a call, and its number for the call."""

    identity: bytes
    call_id: int


@dataclass(slots=True)
class Deferred:
    """An action that runs once no step is in flight. `drain`: once all requests have ended as well."""

    caller: Caller
    action: Callable[[Caller], None]
    drain: bool


class Control:
    """Runs calls, and answers them.

    Attributes:
        paused: new requests are held back. asleep: the worker has given memory back.
    """

    def __init__(self, core: ControlledEngine) -> None:
        self._core = core
        self._deferred: list[Deferred] = []
        self._worker_calls: dict[int, tuple[Caller, Callable[[Any], Any]]] = {}
        self._call_ids = count()
        self.paused = False
        self.asleep = False
        self._methods: dict[str, Callable[..., None]] = {
            name: getattr(self, name) for name, call in CALLS.items() if call.runs_in is not RunsIn.WORKER
        }

    @property
    def holds_plans(self) -> bool:
        """True while no step may be launched: the worker sleeps, or an action waits until no step is in flight."""
        return self.asleep or any(not deferred.drain for deferred in self._deferred)

    def call(self, identity: bytes, call: Call) -> None:
        """Check a call and run its method, which answers it then or later. An error is answered at once."""
        caller = Caller(identity, call.call_id)
        self._core.deliver()  # what requests gave comes before the answer
        try:
            if call.method not in CALLS:
                raise ValueError(f"no method {call.method!r}; there are {', '.join(sorted(CALLS))}")
            arguments = CALLS[call.method].receive(call.args, call.kwargs)
            if (method := self._methods.get(call.method)) is not None:
                method(caller, **arguments)
            else:
                self._call_worker(caller, call.method, arguments, in_list)
        except Exception as error:  # a caller's mistake must not end the core
            self._refuse(caller, error)

    def advance(self) -> None:
        """Run the deferred actions that need wait no longer."""
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

    def receive(self, reply: WorkerReply) -> None:
        """Answer the call that the worker has answered."""
        caller, finish = self._worker_calls.pop(reply.call_id)
        if reply.error is not None:
            kind = reply.error_type or "RuntimeError"
            self._send(caller, CallAnswer(caller.call_id, error=reply.error, error_type=kind))
        else:
            self._reply(caller, finish(reply.result))

    def worker_lost(self, why: str) -> None:
        """Answer the calls that the lost worker had not answered with an error. A new worker starts awake."""
        self.asleep = False
        lost, self._worker_calls = self._worker_calls, {}
        for caller, _ in lost.values():
            self._refuse(caller, RuntimeError(f"the worker was lost: {why}"))

    # ------------------------------------------------------------ methods, as `CALLS` declares them

    def reset_prefix_cache(self, caller: Caller, reset_running_requests: bool) -> None:
        """Forget cached prefixes; with `reset_running_requests` preempt what uses them. Answers success."""
        if not reset_running_requests:
            return self._reply(caller, self._core.scheduler.reset_prefix_cache())

        def reset(caller: Caller) -> None:
            self._core.scheduler.preempt_all()
            self._reply(caller, self._core.scheduler.reset_prefix_cache())

        self._deferred.append(Deferred(caller, reset, drain=False))

    def pause(self, caller: Caller, wait_for_inflight_requests: bool, clear_cache: bool) -> None:
        """Hold new requests back; answers once the others have ended, by themselves or by an abort."""
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
        """Admit the requests that were held back, and new ones."""
        self.paused = False
        self._core.admit_held()
        self._reply(caller, None)

    def is_paused(self, caller: Caller) -> None:
        """Answer whether new requests are held back."""
        self._reply(caller, self.paused)

    def abort_request(self, caller: Caller, request_id: str, frontend: int | None) -> None:
        """End the requests with this id: those of the frontend with this number, or of any. Answers how many
        sequences that ended.
        """
        matching = [
            request
            for client, request in self._core.requests()
            if request.request_id == request_id and frontend in (None, client.number)
        ]
        self._reply(caller, self._core.abort(matching))

    def sleep(self, caller: Caller, level: int) -> None:
        """Let the worker give memory back.

        Raises:
            EngineBusyError: requests are unfinished.
        """
        if self._core.scheduler.num_unfinished:
            raise EngineBusyError(f"{self._core.scheduler.num_unfinished} requests are unfinished")

        def asleep(result: Any) -> None:
            self._core.scheduler.reset_prefix_cache()

        self.asleep = True
        self._call_worker(caller, "sleep", {"level": level}, asleep)

    def wake_up(self, caller: Caller, tags: list[str] | None) -> None:
        """Let the worker take its memory again."""

        def awake(result: Any) -> None:
            self.asleep = False

        if not self.asleep:
            return self._reply(caller, None)
        self._call_worker(caller, "wake_up", {"tags": tags}, awake)

    def is_sleeping(self, caller: Caller) -> None:
        """Answer whether the worker has given memory back."""
        self._reply(caller, self.asleep)

    def collective_rpc(
        self, caller: Caller, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None:
        """Call a method of every worker; answers the list of results."""
        self._call_worker(caller, method, kwargs or {}, in_list, args)

    def metrics(self, caller: Caller) -> None:
        """Answer the value of every metric."""
        self._reply(caller, metrics.snapshot(self._core))

    def status(self, caller: Caller) -> None:
        """Answer the core's state."""
        self._reply(caller, reports.status(self._core))

    def requests(self, caller: Caller, limit: int) -> None:
        """Answer a list of at most `limit` unfinished sequences, of all frontends."""
        self._reply(caller, reports.requests(self._core, limit))

    # ------------------------------------------------------------ answers

    def _call_worker(
        self,
        caller: Caller,
        method: str,
        kwargs: dict[str, Any],
        finish: Callable[[Any], Any],
        args: Iterable[Any] = (),
    ) -> None:
        """Call a method of the worker; the caller gets what `finish` makes of its result."""
        call_id = next(self._call_ids)
        self._worker_calls[call_id] = (caller, finish)
        self._core.worker.send(WorkerCall(call_id, method, list(args), kwargs))

    def _reply(self, caller: Caller, result: Any) -> None:
        self._send(caller, CallAnswer(caller.call_id, result))

    def _refuse(self, caller: Caller, error: Exception) -> None:
        self._send(caller, CallAnswer(caller.call_id, error=error_text(error), error_type=error_type(error)))

    def _send(self, caller: Caller, reply: CallAnswer) -> None:
        self._core.clients.answer(caller.identity, reply)


def in_list(result: Any) -> list[Any]:
    """The results of all workers, of which there is one."""
    return [result]
