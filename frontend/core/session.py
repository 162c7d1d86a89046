"""The open requests of a frontend, on a connection to an engine core that outlives cores.

    Session.submit --> Supervisor.client --> core
    Session.take <---- deltas <- [client] <- core        (they are applied on the client's thread)

`LLMEngine`, `LLM` and `AsyncLLM` use it, and differ in how they wait: each request is submitted with a mailbox,
which receives the request whenever it has new output to `take`. `open_session.py` makes sessions.

When the core is lost and another takes its place (`supervisor.py`), open requests go on there with the tokens that
they have (`custody.py`). After a crash suspects are tried one by one first (`trials.py`), while others are held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeAlias

from pagewire.frontend import wiring
from pagewire.frontend.core.core_source import CoreProcess
from pagewire.frontend.core.custody import Custody, ended_sequences, request_to_resume
from pagewire.frontend.core.mailbox import Mailbox
from pagewire.frontend.core.metrics import Metric, read_metrics
from pagewire.frontend.core.request_table import RequestTable, Spans, portions
from pagewire.frontend.core.stat_loggers import StatLoggerBase, StatLoggers
from pagewire.frontend.core.supervisor import Cores, EngineClient, Owner
from pagewire.frontend.core.trials import Failed, SuspectTrials
from pagewire.frontend.requests.answer_budget import LogprobBudget
from pagewire.frontend.requests.inputs import Intake, Prepared
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.frontend.requests.outputs import RequestOutput, RequestState
from pagewire.ipc.environment import check_environment
from pagewire.ipc.errors import (
    DetachedError,
    EngineBusyError,
    EngineDeadError,
    EngineStoppedError,
    RequestCrashedEngineError,
)
from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.messages import Deltas, EngineInfo, Request
from pagewire.ipc.wire.pooling import PoolingParams

logger = logging.getLogger("pagewire.frontend")

METRICS_SECONDS = 5.0  # for the core's answer, after which the loggers of statistics go without
# Python's locks are not fair: who waits for one gets it if its owner rests for a moment.
HOLD_SECONDS, YIELD_SECONDS = 0.004, 0.0002

Call: TypeAlias = Callable[..., Future[Any]]


class Session:
    """The open requests of a frontend, and the connection to the core, or to several, that has them.

    connect: makes the connection. open_intake: makes what turns prompts into requests, given what the engine is and
    how to call it. traces_endpoint: URL of an OpenTelemetry collector that gets a span per request.
    stat_loggers: the program's own, by name.

    Attributes:
        connection: to the core. info: model and options of the core. intake: makes requests of prompts.
        gone: gets the error when the core is lost for good; cancelled by `close`.
        stat_loggers: the program's own loggers of statistics.

    Raises:
        as `connect` and `open_intake`. ValueError: as `check_environment`.
    """

    def __init__(
        self,
        connect: Callable[[Owner], Cores],
        open_intake: Callable[[EngineInfo, Call], Intake],
        traces_endpoint: str | None = None,
        stat_loggers: Mapping[str, StatLoggerBase] | None = None,
    ) -> None:
        check_environment()
        self.gone: Future[EngineDeadError] = Future()
        tracer: Spans | None = None if traces_endpoint is None else wiring.Tracer(traces_endpoint)
        # Guards all below, except the connection and its clients, which are thread-safe.
        self._lock = threading.RLock()
        self._table = RequestTable(tracer)
        self._custody = Custody()
        self._closing = threading.Event()
        self._trials = SuspectTrials(self._lock, self._custody, self._closing, self._resume, self._fail)
        self._held_seconds = 0.0  # time of the client's thread with the lock since it rested
        self.stat_loggers = StatLoggers({}, self.get_metrics)
        try:
            self.connection = connect(self)
        except BaseException:
            self._table.shutdown()
            raise
        self.info: EngineInfo = self.connection.info
        try:
            self.intake = open_intake(self.info, self.call)
        except BaseException:
            self.close()
            raise
        self.stat_loggers = StatLoggers(stat_loggers or {}, self.get_metrics)

    # -------------------------------------------------------------- any thread

    def submit(
        self,
        prepared: Sequence[Prepared],
        mailbox: Mailbox,
        trace_headers: Mapping[str, str] | None = None,
        logprob_budget: LogprobBudget | None = None,
    ) -> list[RequestState]:
        """Send requests to the core; returns their states.

        A request that is too large for a message ends at once, alone, with a ValueError (`RequestState.exception`).

        prepared: made by `intake`. mailbox: receives a request whenever it has new output.
        trace_headers: W3C trace context of the parent span.
        logprob_budget: of the answer that these requests make; a request that exceeds it ends with a ValueError.

        Raises:
            ValueError: a request id is in use. EngineDeadError: the core is lost.
        """
        states = [new_state(item, logprob_budget) for item in prepared]
        with self._lock:
            self.connection.check()
            try:
                for state in states:
                    self._table.add(state, mailbox, self.info.served_model_names[0], trace_headers)
                failed: Failed = []
                if not self._custody.hold(states):
                    failed = self._send(self.connection.client, [state.request for state in states])
            except BaseException:
                self._drop(states)
                raise
        self._fail(failed)
        return states

    def take(self, state: RequestState) -> RequestOutput | None:
        """The new output of a request; None if nothing is new.

        Raises:
            EngineDeadError: the core was lost before the request had ended.
        """
        with self._lock:
            if state.error is not None and isinstance(error := state.exception(), EngineDeadError):
                raise error
            return state.take()

    def find(self, request_ids: Iterable[str]) -> list[RequestState]:
        """The open requests with these ids."""
        with self._lock:
            return self._table.find(request_ids)

    def abort(self, states: Iterable[RequestState]) -> None:
        """End requests with finish reason "abort"; requests that have ended keep their reason."""
        with self._lock:
            live = [state for state in states if self._table.has(state)]
            for state in live:
                state.end("abort")
            mailboxes = [(self._table.mailboxes[state.key], state) for state in live]
            self._drop(live)
            if live:
                self.connection.client.abort([state.key for state in live])
        for mailbox, state in mailboxes:
            mailbox.put([state])

    def call(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send a call to the core; the future gets the answer, or the error that the core reports.

        name: one of `CALLS`; the core refuses others. The arguments are those of the method that declares the call.

        Raises:
            EngineDeadError: the core is lost. TypeError: wrong arguments, or a value that msgpack cannot represent.
            ValueError: an argument is out of bounds.
        """
        if name == "reset_mm_cache" and self.intake.media is not None:
            self.intake.media.clear()
        if (call := CALLS.get(name)) is None:
            return self.connection.client.call(name, *args, **kwargs)
        return self.connection.client.call(name, *call.pack(args, kwargs))

    def add_lora(self, lora_request: LoRARequest) -> Future[Any]:
        """Register an adapter with the core; the future gets True once it was read, or the error.

        Raises:
            ValueError, TypeError: no such adapter. EngineDeadError: the core is lost.
        """
        source = self.intake.adapters.source(lora_request)
        return self.call("register_adapter", source.name, source.adapter_id, source.path, source.version)

    def get_metrics(self, timeout: float | None = METRICS_SECONDS) -> list[Metric]:
        """A snapshot of the core's metrics, over all its frontends.

        Raises:
            EngineDeadError: the core is lost. concurrent.futures.TimeoutError: no answer in `timeout` seconds.
        """
        return read_metrics(self.call("metrics").result(timeout))

    def close(self) -> None:
        """Detach, stop the core if it was spawned here, and end every open request. May be called twice."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            self._trials.stop_waiting()
        self.connection.close()
        self.gone.cancel()
        self._end_all(EngineDeadError("the engine was shut down"))
        self.stat_loggers.stop()
        self._table.shutdown()

    @property
    def dead(self) -> EngineDeadError | None:
        """The error with which the core was lost, until another core replaces it; None while there is a core."""
        return self.connection.dead

    @property
    def _spawned(self) -> CoreProcess | None:
        return self.connection.spawned

    def validate(self) -> None:
        """Check what holds between two events; tests call it.

        Raises:
            AssertionError: it does not hold.
        """
        with self._lock:
            self._custody.validate(list(self._table))

    # -------------------------------------------------------------- on the client's thread

    def take_deltas(self, deltas: Deltas) -> None:
        """Add new output to its requests, and notify their mailboxes.

        Log probabilities take long; threads that wait for the lock, such as an event loop, get it in between.
        """
        for portion in portions(deltas):
            if self._held_seconds > HOLD_SECONDS:
                time.sleep(YIELD_SECONDS)
                self._held_seconds = 0.0
            begin = time.monotonic()
            self._take_portion(portion)
            self._held_seconds += time.monotonic() - begin

    def _take_portion(self, deltas: Deltas) -> None:
        with self._lock:
            states, to_drop = self._table.outputs.process(deltas)
            if to_drop.keys or to_drop.sequences:
                self.connection.client.abort(to_drop.keys, to_drop.sequences)
            ready: defaultdict[Mailbox, list[RequestState]] = defaultdict(list)
            for state in states:
                ready[self._table.mailboxes[state.key]].append(state)
            self._trials.check_progress()
            self._drop([state for state in states if state.finished])
        for mailbox, new in ready.items():
            mailbox.put(new)

    def requests_refused(self, keys: list[int], error: Exception) -> None:
        """End requests that the core could not read."""
        with self._lock:
            known = self._table.outputs.states
            states = [known[key] for key in keys if key in known]
        self._fail([(state, error) for state in states])

    def core_failing(self) -> None:
        """End the wait for a suspect: the core is lost."""
        self._trials.stop_waiting()

    # -------------------------------------------------------------- on the thread of the connection

    def core_lost(self, error: EngineDeadError, keys: Collection[int] | None = None) -> None:
        """Keep what the core had for another core, except the request that is to blame."""
        by_accident = not isinstance(error, (EngineStoppedError, DetachedError))
        with self._lock:
            guilty = self._custody.core_lost(list(self._table), keys, by_accident=by_accident)
        if guilty is not None:
            text = f"the engine died twice with this request, which is not tried again ({error})"
            logger.error("request %.100r ends: %s", guilty.request_id, text)
            self._fail([(guilty, RequestCrashedEngineError(text))])

    def core_attached(self, client: EngineClient, others: EngineClient | None = None) -> None:
        """Let what is held go on with another core: suspects one by one first, then all."""
        self._trials.run(client)
        with self._lock:
            if self._closing.is_set() or client.dead is not None or not self._custody.recovering:
                return  # it is lost as well, or none of the open requests was on the core that is lost
            try:
                failed = self._resume(others or client, self._custody.to_resume())
            except EngineDeadError:
                return
            self._custody.resumed()
        self._fail(failed)

    def core_gone(self, error: EngineDeadError) -> None:
        """End every open request with the error with which the core was lost."""
        self._end_all(error)
        with suppress(InvalidStateError):  # `close` has cancelled it
            self.gone.set_result(error)

    def _end_all(self, error: EngineDeadError) -> None:
        with self._lock:
            states = list(self._table)
        self._fail([(state, error) for state in states])

    def _fail(self, failed: Iterable[tuple[RequestState, Exception]]) -> None:
        """End requests with an error, and notify their mailboxes. Called without the lock."""
        with self._lock:
            live = [(state, error) for state, error in failed if self._table.has(state)]
            for state, error in live:
                state.fail(error)
            mailboxes = [(self._table.mailboxes[state.key], state) for state, _ in live]
            self._drop([state for state, _ in live])
        for mailbox, state in mailboxes:
            mailbox.put([state])

    # -------------------------------------------------------------- under the lock

    def _resume(self, client: EngineClient, states: list[RequestState]) -> Failed:
        """Send requests to another core, where they go on. Returns those that it cannot get, with the errors."""
        try:
            failed = self._send(client, [request_to_resume(state) for state in states])
        except EngineBusyError as error:
            return [(state, error) for state in states]
        client.abort(sequences=[place for state in states for place in ended_sequences(state)])
        return failed

    def _send(self, client: EngineClient, requests: list[Request]) -> Failed:
        """Send requests to the core. Returns those that are too large, with the errors."""
        refused = client.submit(requests)
        return [(self._table.outputs.states[request.key], error) for request, error in refused]

    def _drop(self, states: Iterable[RequestState]) -> None:
        for state in states:
            if self._table.has(state):
                self._custody.drop(state)
                self._trials.drop(state)
                self._table.drop(state)


def new_state(item: Prepared, logprob_budget: LogprobBudget | None) -> RequestState:
    """The state of a request that is to be sent. logprob_budget: see `Session.submit`."""
    if isinstance(item.request.task, PoolingParams):
        pooled: RequestState = wiring.PooledState(item.request)
        return pooled
    return RequestState(
        item.request,
        item.prompt_text,
        item.tokenizer,
        logprob_budget,
        item.adapter,
        item.num_virtual_tokens,
        item.source,
    )
