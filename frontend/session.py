"""A connection to an engine core and the open requests on it; a lost core is reported or replaced.

    prepare --> submit --> [client] --> core
    take <-- Outputs <---- [client] <-- core        (deltas are applied on the client's thread)

`LLMEngine`, `LLM` and `AsyncLLM` use it, and differ in how they wait: each request is submitted with a mailbox,
which receives the request whenever it has new output to `take`.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from pagewire.frontend.client import START_ERRORS, CoreClient
from pagewire.frontend.inputs import Intake, Prepared, PromptType
from pagewire.frontend.metrics import Metric, read_metrics
from pagewire.frontend.outputs import Outputs, RequestOutput, RequestState
from pagewire.frontend.spawn import SpawnedCore, spawn_core
from pagewire.frontend.stat_loggers import StatLoggerBase, StatLoggers
from pagewire.frontend.text.tokenizer import Tokenizer, as_tokenizer, load_tokenizer
from pagewire.frontend.tracing import Tracer
from pagewire.ipc.calls import CALLS
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.messages import EngineInfo, Request, TokenDelta
from pagewire.ipc.options import EngineArgs
from pagewire.ipc.params import SamplingParams
from pagewire.ipc.sockets import CurveKeys

logger = logging.getLogger("pagewire.frontend")

Connection = tuple[CoreClient, SpawnedCore | None]
RETRY_SECONDS = 0.5  # between two attempts to attach to another core
METRICS_SECONDS = 5.0  # for the core's answer, after which the loggers of statistics go without


class Mailbox(Protocol):
    """Receives the requests that have new output."""

    def put(self, states: list[RequestState]) -> None:
        """Receive requests that have new output. Called on the client's thread: must not block."""


class Inbox:
    """A mailbox for a thread that blocks until there is new output."""

    def __init__(self) -> None:
        self._ready: dict[int, RequestState] = {}
        self._arrival = threading.Condition()

    def put(self, states: list[RequestState]) -> None:
        """Wake the waiting thread."""
        with self._arrival:
            self._ready.update((state.request.key, state) for state in states)
            self._arrival.notify()

    def get(self) -> list[RequestState]:
        """Wait until a request has new output; returns all that have, each once."""
        with self._arrival:
            self._arrival.wait_for(lambda: self._ready)
            ready, self._ready = self._ready, {}
        return list(ready.values())


class Session:
    """A connection to a core, made by `spawn` or `attach`, and the open requests on it.

    Attributes:
        info: model and options of the core. tokenizer: of the frontend; None with `skip_tokenizer_init`.
        dead: the error with which the core was lost, until another core replaces it; None while there is a core.
        stat_loggers: the program's own loggers of statistics.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None

    def __init__(
        self,
        connect: Callable[[Session], Connection],
        replace: Callable[[Session, EngineDeadError], Connection],
        traces_endpoint: str | None = None,
    ) -> None:
        """connect: attaches to the first core. replace: attaches to another core after one was lost, or raises the
        error that it is given.
        """
        self.dead: EngineDeadError | None = None
        self._replace = replace
        self._lock = threading.RLock()  # guards all below except the client, which is thread-safe
        self._outputs = Outputs()
        self._open: dict[str, RequestState] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._keys = itertools.count()
        self._closing = threading.Event()
        self._tracer = None if traces_endpoint is None else Tracer(traces_endpoint)
        self.stat_loggers = StatLoggers({}, self.get_metrics)
        try:
            self._client, self._spawned = connect(self)
        except BaseException:
            if self._tracer is not None:
                self._tracer.shutdown()
            raise
        self.info = self._client.info

    @classmethod
    def spawn(
        cls, args: EngineArgs, restarts: int = 0, stat_loggers: Mapping[str, StatLoggerBase] | None = None
    ) -> Session:
        """Spawn a core, wait until it is ready, and load the tokenizer.

        restarts: how many cores may replace one that was lost.
        stat_loggers: loggers of statistics by name, which get the engine's figures until `close`.

        Raises:
            ValueError, TypeError: bad options, or a model that cannot be loaded. ModelNotFoundError: no such model.
            EngineDeadError: the core failed while it started; the text is the cause.
        """
        args.check()
        restarts_left = itertools.count(restarts, -1)

        def connect(session: Session) -> Connection:
            spawned = spawn_core(args)
            try:
                client = session._attach(spawned.address, child=spawned.child, name="owner", timeout=None)
            except BaseException:
                spawned.shutdown()
                raise
            return client, spawned

        def replace(session: Session, error: EngineDeadError) -> Connection:
            if (remaining := next(restarts_left)) <= 0:
                raise error
            logger.error("%s; starting another core (restarts left after this one: %d)", error, remaining - 1)
            if session._spawned is not None:
                session._spawned.shutdown()
            return connect(session)

        session = cls(connect, replace, args.otlp_traces_endpoint)._with_tokenizer(
            None,
            salt=0,
            token=args.hf_token,
            cache_dir=args.download_dir,
            trust_remote_code=args.trust_remote_code,
        )
        session.stat_loggers = StatLoggers(stat_loggers or {}, session.get_metrics)
        return session

    @classmethod
    def attach(
        cls,
        address: str,
        *,
        curve: CurveKeys | None,
        tokenizer: str | None,
        timeout: float | None,
        name: str = "attached",
        traces_endpoint: str | None = None,
        reattach_timeout: float = 0.0,
        peer_uid: int | None = None,
        trust_remote_code: bool = False,
    ) -> Session:
        """Attach to a running core, and load the tokenizer.

        tokenizer: folder or id; None: the core's, of which no code is run unless `trust_remote_code` is set here.
        peer_uid: see `CoreClient.connect`. name: of this frontend, for the core's log and metrics.
        timeout: seconds to wait for a connection. traces_endpoint: URL of an OpenTelemetry collector.
        reattach_timeout: seconds to wait for another core at the address after this one was lost; open requests
            continue there.

        Raises:
            EngineDeadError: no core answers. ProtocolError: it uses another version. ValueError: a bad address.
            If the core fails while it starts: as `spawn`.
        """

        def connect(session: Session, timeout: float | None = timeout) -> Connection:
            return session._attach(address, curve=curve, peer_uid=peer_uid, name=name, timeout=timeout), None

        def replace(session: Session, error: EngineDeadError) -> Connection:
            if reattach_timeout <= 0:
                raise error
            give_up = time.monotonic() + reattach_timeout
            failure: Exception = error
            logger.error("%s; waiting %g s for another core at %s", error, reattach_timeout, address)
            while not session._closing.wait(RETRY_SECONDS) and time.monotonic() < give_up:
                try:
                    return connect(session, RETRY_SECONDS)
                except EngineDeadError:
                    pass  # no core listens yet
                except START_ERRORS as start_failure:
                    failure = start_failure
            raise failure

        # Frontends on one core must not draw the same seeds.
        return cls(connect, replace, traces_endpoint)._with_tokenizer(
            tokenizer, salt=int.from_bytes(os.urandom(7), "little"), trust_remote_code=trust_remote_code
        )

    def _attach(self, address: str, **options: Any) -> CoreClient:
        return CoreClient.connect(address, on_deltas=self._take_deltas, on_dead=self._core_lost, **options)

    def _with_tokenizer(self, name: str | None, salt: int, **source: Any) -> Session:
        """Load the tokenizer, unless `skip_tokenizer_init` is set and no `name` is given. Returns this session."""
        try:
            tokenizer = None
            if name is not None or not self.info.skip_tokenizer_init:
                tokenizer = load_tokenizer(
                    name or self.info.tokenizer,
                    self.info.tokenizer_mode,
                    revision=None if name else self.info.tokenizer_revision,
                    **source,
                )
            self._intake = Intake(self.info, tokenizer, salt)
            self.tokenizer = tokenizer
        except BaseException:
            self.close()
            raise
        return self

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer, of pagewire or of transformers, for new requests.

        Raises:
            TypeError: `tokenizer` is not a tokenizer.
        """
        self._intake.tokenizer = self.tokenizer = as_tokenizer(tokenizer)

    # -------------------------------------------------------------- requests

    def prepare(
        self,
        prompt: PromptType,
        params: SamplingParams | None,
        request_id: str,
        priority: int = 0,
        age: float = 0.0,
    ) -> Prepared:
        """The request for a prompt, checked, tokenized and ready for `submit`. age: seconds since it arrived.

        Raises:
            ValueError, TypeError: a bad prompt or parameter.
        """
        return self._intake.prepare(prompt, params, request_id, next(self._keys), priority, age)

    def tokenize(self, prompt: PromptType) -> list[int]:
        """The token ids of a prompt.

        Raises:
            ValueError, TypeError: a bad prompt.
        """
        return self._intake.tokenize(prompt)[0]

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token; None if the model has none."""
        return self._intake.eos_token_id

    def submit(
        self,
        prepared: Sequence[Prepared],
        mailbox: Mailbox,
        trace_headers: Mapping[str, str] | None = None,
    ) -> list[RequestState]:
        """Send requests to the core; returns their states.

        mailbox: receives a request whenever it has new output. trace_headers: W3C trace context of the parent span.

        Raises:
            ValueError: a request id is in use. EngineDeadError: the core is lost.
        """
        states = [RequestState(item.request, item.prompt_text, self.tokenizer) for item in prepared]
        with self._lock:
            self._check_alive()
            for state in states:
                if state.request_id in self._open:
                    self._drop(states)
                    raise ValueError(f"request id {state.request_id!r} is in use")
                self._open[state.request_id] = state
                self._outputs.add(state)
                self._mailboxes[state.key] = mailbox
                if self._tracer is not None:
                    self._tracer.begin(state, self.info.served_model_names[0], trace_headers)
            try:
                self._client.submit([state.request for state in states])
            except BaseException:
                self._drop(states)
                raise
        return states

    def take(self, state: RequestState) -> RequestOutput | None:
        """The new output of a request; None if nothing is new.

        Raises:
            EngineDeadError: the core was lost before the request had ended.
        """
        with self._lock:
            if state.error is not None:
                self._check_alive()
            return state.take()

    def find(self, request_ids: Iterable[str]) -> list[RequestState]:
        """The open requests with these ids."""
        with self._lock:
            return [self._open[name] for name in request_ids if name in self._open]

    def abort(self, states: Iterable[RequestState]) -> None:
        """End requests with finish reason "abort"; requests that have ended keep their reason."""
        with self._lock:
            live = [state for state in states if self._open.get(state.request_id) is state]
            for state in live:
                state.end("abort")
            mailboxes = [(self._mailboxes[state.key], state) for state in live]
            self._drop(live)
            if live:
                self._client.abort([state.key for state in live])
        for mailbox, state in mailboxes:
            mailbox.put([state])

    def call(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send a call to the core; the future gets the answer, or the error that the core reports.

        name: one of `CALLS`; the core refuses others. The arguments are those of the method that declares the call.

        Raises:
            EngineDeadError: the core is lost. TypeError: wrong arguments, or a value that msgpack cannot represent.
            ValueError: an argument is out of bounds.
        """
        if (call := CALLS.get(name)) is None:
            return self._client.call(name, *args, **kwargs)
        return self._client.call(name, *call.pack(args, kwargs))

    def get_metrics(self, timeout: float | None = METRICS_SECONDS) -> list[Metric]:
        """A snapshot of the core's metrics, over all its frontends.

        Raises:
            EngineDeadError: the core is lost. concurrent.futures.TimeoutError: no answer in `timeout` seconds.
        """
        return read_metrics(self.call("metrics").result(timeout))

    def close(self) -> None:
        """Detach, and stop the core if this session spawned it. May be called twice."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._client.close()
        self.stat_loggers.stop()
        if self._spawned is not None:
            self._spawned.shutdown()
        self._end_all(EngineDeadError("the engine was shut down"))
        if self._tracer is not None:
            self._tracer.shutdown()

    # -------------------------------------------------------------- on the client's thread

    def _take_deltas(self, deltas: list[TokenDelta]) -> None:
        with self._lock:
            states, sequences = self._outputs.process(deltas)
            if sequences:
                self._client.abort(sequences=sequences)
            ready: dict[Mailbox, list[RequestState]] = {}
            for state in states:
                if state.has_output:
                    ready.setdefault(self._mailboxes[state.key], []).append(state)
            self._drop([state for state in states if state.finished])
        for mailbox, new in ready.items():
            mailbox.put(new)

    def _core_lost(self, error: EngineDeadError) -> None:
        """Replace the core and resubmit open requests; without another core they end with the cause."""
        self.dead = error  # until another core has been found
        try:
            client, spawned = self._replacement(error)
        except EngineDeadError as cause:
            self.dead = cause
            self._end_all(cause)
            return
        with self._lock:
            self._client, self._spawned = client, spawned
            if self._closing.is_set():  # `close` was called meanwhile, and has closed the lost client only
                client.close()
                return
            self.dead = None
            client.submit([resumed(state) for state in self._open.values()])
            client.abort(sequences=[place for state in self._open.values() for place in ended(state)])

    def _replacement(self, error: EngineDeadError) -> Connection:
        """A connection to another core of the same model.

        Raises:
            EngineDeadError: there is none; the text is the cause.
        """
        if self._closing.is_set():
            raise error
        try:
            client, spawned = self._replace(self, error)
        except Exception as failure:
            if failure is error:
                raise
            raise EngineDeadError(f"{error}; another core did not start: {failure}") from failure
        if not same_model(client.info, self.info):
            client.close()
            raise EngineDeadError(f"{error}; the new one serves another model, {client.info.model}")
        return client, spawned

    def _end_all(self, error: EngineDeadError) -> None:
        """End every open request with the error with which the core was lost."""
        with self._lock:
            self.dead = self.dead or error
            states = self._outputs.fail(error)
            mailboxes = [(self._mailboxes[state.key], state) for state in states]
            self._drop(states)
        for mailbox, state in mailboxes:
            mailbox.put([state])

    # -------------------------------------------------------------- under the lock

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(*self.dead.args)

    def _drop(self, states: Iterable[RequestState]) -> None:
        for state in states:
            if self._open.get(state.request_id) is state:
                del self._open[state.request_id]
                self._outputs.drop(state.key)
                del self._mailboxes[state.key]
                if self._tracer is not None:
                    self._tracer.end(state)


def same_model(first: EngineInfo, second: EngineInfo) -> bool:
    """True if requests prepared for one engine are valid for the other."""
    names = (
        *("model", "architecture", "dtype", "vocab_size", "max_model_len"),
        *("tokenizer", "tokenizer_revision"),
    )
    return all(getattr(first, name) == getattr(second, name) for name in names)


def resumed(state: RequestState) -> Request:
    """The request as a new core gets it, to go on where the lost one was.

    What was delivered is not delivered again: tokens, and log probabilities of the prompt. A sequence that has
    ended is sent without tokens, so that the core takes it, and is aborted then.
    """
    token_ids = [
        tokens if reason is None else []
        for tokens, reason in zip(state.output_token_ids, state.finish_reasons, strict=True)
    ]
    return msgspec.structs.replace(
        state.request, output_token_ids=token_ids, num_prompt_logprobs=state.num_prompt_logprobs
    )


def ended(state: RequestState) -> list[tuple[int, int]]:
    """(key, index) of each sequence of the request that has ended."""
    return [(state.key, index) for index, reason in enumerate(state.finish_reasons) if reason is not None]


def ignore_usage_context(usage_context: Any) -> None:
    """Log a warning if a usage context is given: no usage statistics are collected."""
    if usage_context is not None:
        logger.warning("usage_context has no effect: usage statistics are never collected")


def refuse_unsupported(**values: Any) -> None:
    """Refuse arguments of features that are not implemented yet.

    Raises:
        ValueError: one of them is not None.
    """
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"{name} is not supported yet")
