"""The open requests of a session: their states, who waits for them, and which of them the core has.

    submit --> [client] --> core
    take <-- Outputs <---- [client] <-- core        (deltas are applied on the client's thread)

When the core is lost and another takes its place (`supervisor.py`), open requests go on there with the tokens that
they have (`custody.py`). After a crash the suspects are tried one by one first (`blame.py`), while others are held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Protocol, TypeAlias

import msgspec

from pagewire.frontend.core.blame import TRIALS, SuspectTrial
from pagewire.frontend.core.custody import Custody
from pagewire.frontend.core.mailbox import Mailbox
from pagewire.frontend.core.supervisor import Cores, EngineClient, Owner
from pagewire.frontend.requests.answer_budget import num_logprobs
from pagewire.frontend.requests.outputs import Outputs, RequestOutput, RequestState
from pagewire.ipc.errors import (
    DetachedError,
    EngineBusyError,
    EngineDeadError,
    EngineStoppedError,
    RequestCrashedEngineError,
)
from pagewire.ipc.wire.messages import Deltas, Request

logger = logging.getLogger("pagewire.frontend")

TRIAL_SECONDS = 30.0  # for the trials of all suspects after a core was lost, while other requests wait

PORTION = 2048  # log probabilities that are added to requests without a pause: a few milliseconds
DELTA_PORTION = 8  # a delta without any takes as long as these
# Python's locks are not fair: who waits for one gets it if its owner rests for a moment.
HOLD_SECONDS, YIELD_SECONDS = 0.004, 0.0002

Failed: TypeAlias = list[tuple[RequestState, Exception]]


class Spans(Protocol):
    """Sends a span of each request to a collector; `tracing.py` has one."""

    def begin(self, state: RequestState, model: str, headers: Mapping[str, str] | None) -> None:
        """A request is submitted."""

    def end(self, state: RequestState) -> None:
        """A request has ended."""

    def shutdown(self) -> None:
        """Send what is left."""


class OpenRequests:
    """The requests of a session that have not ended, on a connection that outlives cores.

    connect: connects to the core, or to several.

    Attributes:
        connection: to the core. gone: gets the error when the core is lost for good; cancelled by `close`.

    Raises:
        as `connect`.
    """

    def __init__(self, connect: Callable[[Owner], Cores], tracer: Spans | None) -> None:
        self.gone: Future[EngineDeadError] = Future()
        # Guards all below, except the connection and its clients, which are thread-safe.
        self._lock = threading.RLock()
        self._table = RequestTable(tracer)
        self._custody = Custody()
        self._trial = SuspectTrial()
        self._closing = False
        self._held_seconds = 0.0  # time of the client's thread with the lock since it rested
        self.connection = connect(self)

    # -------------------------------------------------------------- any thread

    def submit(
        self,
        states: Sequence[RequestState],
        mailbox: Mailbox,
        model: str,
        trace_headers: Mapping[str, str] | None,
    ) -> None:
        """Send requests to the core.

        A request that is too large for a message ends at once, alone, with a ValueError (`RequestState.exception`).

        mailbox: receives a request whenever it has new output. model: its name in traces.
        trace_headers: W3C trace context of the parent span.

        Raises:
            ValueError: a request id is in use. EngineDeadError: the core is lost.
        """
        with self._lock:
            self.connection.check()
            try:
                for state in states:
                    self._table.add(state, mailbox, model, trace_headers)
                failed: Failed = []
                if not self._custody.hold(states):
                    failed = self._send(self.connection.client, [state.request for state in states])
            except BaseException:
                self._drop(states)
                raise
        self._fail(failed)

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

    def close(self) -> None:
        """Detach, stop the core if it was spawned here, and end every open request. Called once."""
        with self._lock:
            self._closing = True
            self._trial.stop_waiting()
        self.connection.close()
        self.gone.cancel()
        self._end_all(EngineDeadError("the engine was shut down"))

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
            self._trial.check_progress()
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
        self._trial.stop_waiting()

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
        self._try_suspects(client)
        with self._lock:
            if self._closing or client.dead is not None or not self._custody.recovering:
                return  # it is lost as well, or none of the open requests was on the core that is lost
            try:
                failed = self._resume(others or client, self._custody.to_resume())
            except EngineDeadError:
                return
            self._custody.resumed()
        self._fail(failed)

    def _try_suspects(self, client: EngineClient) -> None:
        """Try suspects one by one on a core, also those of another core that is lost meanwhile."""
        give_up = time.monotonic() + TRIAL_SECONDS
        tried: set[int] = set()
        while len(tried) < TRIALS and (suspects := self._untried(tried)):
            text = "requests that were open when the core died are tried alone: %d"
            logger.warning(text, len(suspects))
            self._settle(client)  # a core that dies before its answer dies of something else
            for state in suspects:
                tried.add(state.key)
                if not self._try_alone(client, state, give_up):
                    return

    def _untried(self, tried: Collection[int]) -> list[RequestState]:
        with self._lock:
            return self._custody.suspects(tried)

    def core_gone(self, error: EngineDeadError) -> None:
        """End every open request with the error with which the core was lost."""
        self._end_all(error)
        with suppress(InvalidStateError):  # `close` has cancelled it
            self.gone.set_result(error)

    def _try_alone(self, client: EngineClient, state: RequestState, give_up: float) -> bool:
        """Run a request alone until it has brought some tokens, then take it back. False: no other can be tried."""
        with self._lock:
            if state.key not in self._custody.held:
                return True  # it has been aborted
            goal = self._custody.goal(state)
            self._trial.begin(state, goal)
            try:
                failed = self._resume(client, [state])
            except EngineDeadError:
                return False
            self._custody.begin_trial(state)
        self._fail(failed)
        if client.dead is None and not self._closing:
            self._trial.wait(max(0.0, give_up - time.monotonic()))
        with self._lock:
            self._trial.end()
            if state.finished:
                return True
            client.abort([state.key])
        self._settle(client)
        with self._lock:
            if client.dead is not None or self._closing:
                return False  # the request was in flight
            has_time = state.num_output_tokens >= goal
            self._custody.end_trial(state, passed=has_time)
        return has_time

    def _settle(self, client: EngineClient) -> None:
        """Wait for the core's answer to a call, before which it has sent all output of aborted requests."""
        with self._lock:
            self._trial.wait_anew()
            try:
                answer = client.call("status")
            except (EngineDeadError, EngineBusyError):
                return
        answer.add_done_callback(lambda _: self._trial.stop_waiting())
        if not self._closing:
            self._trial.wait()

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
            failed = self._send(client, [resumed(state) for state in states])
        except EngineBusyError as error:
            return [(state, error) for state in states]
        client.abort(sequences=[place for state in states for place in ended(state)])
        return failed

    def _send(self, client: EngineClient, requests: list[Request]) -> Failed:
        """Send requests to the core. Returns those that are too large, with the errors."""
        refused = client.submit(requests)
        return [(self._table.outputs.states[request.key], error) for request, error in refused]

    def _drop(self, states: Iterable[RequestState]) -> None:
        for state in states:
            if self._table.has(state):
                self._custody.drop(state)
                self._trial.dropped(state)
                self._table.drop(state)


class RequestTable:
    """Open requests by id and by key, with the mailboxes and trace spans that belong to them. Not thread-safe.

    Attributes:
        outputs: states by key, to which deltas are applied. mailboxes: by key.
    """

    def __init__(self, tracer: Spans | None) -> None:
        self.outputs = Outputs()
        self.mailboxes: dict[int, Mailbox] = {}
        self._by_id: dict[str, RequestState] = {}
        self._tracer = tracer

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._by_id.values())

    def has(self, state: RequestState) -> bool:
        """True if the request is open."""
        return self._by_id.get(state.request_id) is state

    def find(self, request_ids: Iterable[str]) -> list[RequestState]:
        """The open requests with these ids."""
        return [self._by_id[name] for name in request_ids if name in self._by_id]

    def add(
        self, state: RequestState, mailbox: Mailbox, model: str, trace_headers: Mapping[str, str] | None
    ) -> None:
        """Add a request, and begin its span.

        Raises:
            ValueError: its id is in use.
        """
        if state.request_id in self._by_id:
            raise ValueError(f"request id {state.request_id!r} is in use")
        self._by_id[state.request_id] = state
        self.outputs.add(state)
        self.mailboxes[state.key] = mailbox
        if self._tracer is not None:
            self._tracer.begin(state, model, trace_headers)

    def drop(self, state: RequestState) -> None:
        """Remove an open request, and end its span."""
        del self._by_id[state.request_id]
        self.outputs.drop(state.key)
        del self.mailboxes[state.key]
        if self._tracer is not None:
            try:
                self._tracer.end(state)
            except Exception:  # a span less; the others go on
                logger.exception("request %.100r: its span could not be sent", state.request_id)


def resumed(state: RequestState) -> Request:
    """The request as a new core gets it, to go on where the lost one was.

    What was delivered is not delivered again: tokens, and log probabilities of the prompt. A sequence that has
    ended is sent without tokens, so that the core takes it, and is aborted then. What pools starts anew.
    """
    if not state.output_token_ids:
        return state.request
    done = state.request.output_token_ids or [[] for _ in state.finish_reasons]
    token_ids = [
        [*before, *tokens] if reason is None else []
        for before, tokens, reason in zip(done, state.output_token_ids, state.finish_reasons, strict=True)
    ]
    return msgspec.structs.replace(
        state.request,
        prompt=msgspec.structs.replace(state.request.prompt, adapter=state.adapter_content),
        output_token_ids=token_ids,
        num_prompt_logprobs=state.num_prompt_logprobs,
    )


def ended(state: RequestState) -> list[tuple[int, int]]:
    """(key, index) of each sequence of the request that has ended."""
    return [(state.key, index) for index, reason in enumerate(state.finish_reasons) if reason is not None]


def portions(message: Deltas) -> Iterator[Deltas]:
    """The output, in order, in parts that take as long as about `PORTION` log probabilities."""
    most = PORTION // DELTA_PORTION
    for begin in range(0, len(message.keys), most):
        part = slice(begin, begin + most)
        yield Deltas([], message.keys[part], message.token_ids[part])
    begin, size, deltas = 0, 0, message.deltas
    for end, delta in enumerate(deltas, 1):
        size += DELTA_PORTION
        if delta.logprobs is not None or delta.prompt_logprobs is not None:
            size += num_logprobs(delta)
        if size >= PORTION or end == len(deltas):
            yield Deltas(deltas[begin:end])
            begin, size = end, 0
