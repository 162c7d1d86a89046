"""The open requests of a frontend on an engine core, which they outlive.

    prepare --> submit --> [client] --> core
    take <-- Outputs <---- [client] <-- core        (deltas are applied on the client's thread)

`LLMEngine`, `LLM` and `AsyncLLM` use it, and differ in how they wait: each request is submitted with a mailbox,
which receives the request whenever it has new output to `take`.

They survive the loss of a core if another takes its place (`open_requests.py`, `supervisor.py`).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

from pagewire.frontend import wiring
from pagewire.frontend.core.core_source import CoreProcess, RunningCores
from pagewire.frontend.core.mailbox import Mailbox
from pagewire.frontend.core.metrics import Metric, read_metrics
from pagewire.frontend.core.open_requests import OpenRequests, Spans
from pagewire.frontend.core.stat_loggers import StatLoggerBase, StatLoggers
from pagewire.frontend.core.supervisor import Cores, Owner, Supervisor
from pagewire.frontend.media.access import MediaAccess
from pagewire.frontend.requests.answer_budget import LogprobBudget
from pagewire.frontend.requests.inputs import CheckedParams, Intake, MediaPlacer, Prepared
from pagewire.frontend.requests.lora import LoRARequest, SessionAdapters, UsedAdapter
from pagewire.frontend.requests.outputs import RequestOutput, RequestState
from pagewire.frontend.requests.prompt_adapters import PromptAdapterRequest
from pagewire.frontend.text.prompts import PromptType, TextPair
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.ipc.environment import check_environment
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.sockets import CurveKeys

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagewire.ipc.options.engine_args import EngineArgs

logger = logging.getLogger("pagewire.frontend")

P = ParamSpec("P")
F = TypeVar("F", bound="Face")

METRICS_SECONDS = 5.0  # for the core's answer, after which the loggers of statistics go without


class Session:
    """A connection to a core, made by `spawn` or `attach`, and the open requests on it.

    Attributes:
        info: model and options of the core. tokenizer: of the frontend; None with `skip_tokenizer_init`.
        stat_loggers: the program's own loggers of statistics. adapters: where their files are found.
        media: puts pictures and sounds into prompts; None: none are taken.

    Raises:
        as `spawn` or `attach`, whichever made `connect`. ValueError: as `check_environment`.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None

    def __init__(self, connect: Callable[[Owner], Cores], traces_endpoint: str | None = None) -> None:
        check_environment()
        self._keys = itertools.count()
        self._closed = threading.Lock()
        self._tracer: Spans | None = None if traces_endpoint is None else wiring.Tracer(traces_endpoint)
        self.stat_loggers = StatLoggers({}, self.get_metrics)
        try:
            self._requests = OpenRequests(connect, self._tracer)
        except BaseException:
            if self._tracer is not None:
                self._tracer.shutdown()
            raise
        self.info = self._requests.connection.info

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
        access = MediaAccess.read(args.allowed_local_media_path, args.allowed_media_domains)
        connect = partial(Supervisor, wiring.SpawnedCores(args, restarts))
        source = wiring.tokenizer_source(args)
        ahead = wiring.tokenizer_ahead(args, source)
        session = cls(connect, args.otlp_traces_endpoint).with_tokenizer(None, 0, access, ahead, **source)
        session.stat_loggers = StatLoggers(stat_loggers or {}, session.get_metrics)
        return session

    @classmethod
    def attach(
        cls,
        address: str,
        curve: CurveKeys | None = None,
        tokenizer: str | None = None,
        timeout: float | None = 10.0,
        reattach_timeout: float = 0.0,
        peer_uid: int | None = None,
        trust_remote_code: bool = False,
        *,
        name: str = "attached",
        otlp_traces_endpoint: str | None = None,
        allowed_local_media_path: str = "",
        allowed_media_domains: Sequence[str] | None = None,
    ) -> Session:
        """Attach to a core that runs already.

        address: where it listens. curve: keys, if it encrypts. timeout: seconds to wait for an answer.
        tokenizer: folder or id; None: the core's.
        reattach_timeout: seconds to wait for another core of the same model at the address, should this one be
            lost; open requests go on with it where they were.
        peer_uid: id of the user as whom the core runs, if it is neither this process's user nor root.
        trust_remote_code: run the Python code of the core's tokenizer, if it has any.
        name: name of this frontend in the core's log and metrics.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that gets a span per request.
        allowed_local_media_path, allowed_media_domains: those of `EngineArgs`, for this frontend.

        Raises:
            PermissionError: the core runs as another user, or does not admit this user or key.
            EngineDeadError: no core answers. ProtocolError: it uses another version. ValueError: a bad address.
            If the core fails while it starts: as `spawn`.
        """
        # Frontends on one core must not draw the same seeds.
        salt = int.from_bytes(os.urandom(7), "little")
        access = MediaAccess.read(allowed_local_media_path, allowed_media_domains)
        source = RunningCores(address, curve, peer_uid, name, timeout, reattach_timeout)
        session = cls(partial(Supervisor, source), otlp_traces_endpoint)
        return session.with_tokenizer(tokenizer, salt, access, trust_remote_code=trust_remote_code)

    def with_tokenizer(
        self,
        name: str | None,
        salt: int,
        media: MediaAccess,
        ahead: Future[Tokenizer] | None = None,
        **source: Any,
    ) -> Session:
        """Load the tokenizer, unless `skip_tokenizer_init` is set and no `name` is given. Returns this session.

        media: what may be fetched for prompts. ahead: loads the tokenizer already (see `spawned_cores.py`).
        """
        try:
            tokenizer = tokenizer_of(self.info, name, source) if ahead is None else ahead.result()
            self.media = media_of(self.info, media, self.call)
            self._intake = Intake(self.info, tokenizer, salt, self.media)
            self.adapters = SessionAdapters(self.info, source.get("token"), source.get("cache_dir"))
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
        self._intake.tokenizer = self.tokenizer = wiring.from_programs(tokenizer)

    # -------------------------------------------------------------- requests

    def check(self, params: SamplingParams | None) -> CheckedParams:
        """The parameters, checked and completed once for many prompts.

        Raises:
            ValueError, TypeError: a bad parameter.
        """
        return self._intake.check(params)

    def prepare(
        self,
        prompt: PromptType,
        params: SamplingParams | CheckedParams | None,
        request_id: str,
        priority: int = 0,
        age: float = 0.0,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> Prepared:
        """The request for a prompt, checked, tokenized and ready for `submit`. age: seconds since it arrived.

        Raises:
            ValueError, TypeError: a bad prompt, parameter or adapter.
        """
        adapter = self.adapters.use(lora_request)
        virtual = None if prompt_adapter_request is None else self.prompt_adapters.get(prompt_adapter_request)
        return self._intake.prepare(
            prompt, params, request_id, next(self._keys), priority, age, adapter, virtual
        )

    def prepare_pooling(
        self,
        prompt: PromptType | TextPair,
        params: PoolingParams,
        request_id: str,
        priority: int = 0,
        age: float = 0.0,
        lora_request: LoRARequest | None = None,
    ) -> Prepared:
        """The request to pool a prompt, ready for `submit`. params: made by `pooling.inputs.completed`.

        Raises:
            ValueError, TypeError: a bad prompt, or no such adapter.
        """
        adapter = self.adapters.use(lora_request)
        prepared: Prepared = wiring.prepare(
            self._intake, prompt, params, request_id, next(self._keys), priority, age, adapter
        )
        return prepared

    def tokenize(
        self, prompt: PromptType, truncates: bool = False, lora_request: LoRARequest | None = None
    ) -> list[int]:
        """The token ids of a prompt. truncates: it will be truncated, so it may be longer than the model takes.

        Raises:
            ValueError, TypeError: a bad prompt, or no such adapter.
        """
        return self._intake.tokenize(prompt, truncates, self.adapters.use(lora_request))[0]

    def tokenizer_for(self, lora_request: LoRARequest | None) -> Tokenizer | None:
        """The tokenizer of an adapter, which is the model's if it has none of its own.

        Raises:
            ValueError, TypeError: no such adapter.
        """
        return self._tokenizer_of(self.adapters.use(lora_request))

    @cached_property
    def prompt_adapters(self) -> Any:
        """The prompt adapters that were read: `PromptAdapters`, made when the first one is used."""
        return wiring.PromptAdapters(self.info.embeddings)

    def _tokenizer_of(self, adapter: UsedAdapter | None) -> Tokenizer | None:
        return self.tokenizer if adapter is None else adapter.tokenizer or self.tokenizer

    def add_lora(self, lora_request: LoRARequest) -> Future[Any]:
        """Register an adapter with the core; the future gets True once it was read, or the error.

        Raises:
            ValueError, TypeError: no such adapter. EngineDeadError: the core is lost.
        """
        source = self.adapters.source(lora_request)
        return self.call("register_adapter", source.name, source.adapter_id, source.path, source.version)

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token; None if the model has none."""
        return self._intake.eos_token_id

    def submit(
        self,
        prepared: Sequence[Prepared],
        mailbox: Mailbox,
        trace_headers: Mapping[str, str] | None = None,
        logprob_budget: LogprobBudget | None = None,
    ) -> list[RequestState]:
        """Send requests to the core; returns their states.

        A request that is too large for a message ends at once, alone, with a ValueError (`RequestState.exception`).

        mailbox: receives a request whenever it has new output. trace_headers: W3C trace context of the parent span.
        logprob_budget: of the answer that these requests make; a request that exceeds it ends with a ValueError.

        Raises:
            ValueError: a request id is in use. EngineDeadError: the core is lost.
        """
        states = [state_of(item, self._tokenizer_of(item.adapter), logprob_budget) for item in prepared]
        self._requests.submit(states, mailbox, self.info.served_model_names[0], trace_headers)
        return states

    def take(self, state: RequestState) -> RequestOutput | None:
        """The new output of a request; None if nothing is new.

        Raises:
            EngineDeadError: the core was lost before the request had ended.
        """
        return self._requests.take(state)

    def find(self, request_ids: Iterable[str]) -> list[RequestState]:
        """The open requests with these ids."""
        return self._requests.find(request_ids)

    def abort(self, states: Iterable[RequestState]) -> None:
        """End requests with finish reason "abort"; requests that have ended keep their reason."""
        self._requests.abort(states)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send a call to the core; the future gets the answer, or the error that the core reports.

        name: one of `CALLS`; the core refuses others. The arguments are those of the method that declares the call.

        Raises:
            EngineDeadError: the core is lost. TypeError: wrong arguments, or a value that msgpack cannot represent.
            ValueError: an argument is out of bounds.
        """
        if name == "reset_mm_cache" and self.media is not None:
            self.media.clear()
        if (call := CALLS.get(name)) is None:
            return self._requests.connection.client.call(name, *args, **kwargs)
        return self._requests.connection.client.call(name, *call.pack(args, kwargs))

    def get_metrics(self, timeout: float | None = METRICS_SECONDS) -> list[Metric]:
        """A snapshot of the core's metrics, over all its frontends.

        Raises:
            EngineDeadError: the core is lost. concurrent.futures.TimeoutError: no answer in `timeout` seconds.
        """
        return read_metrics(self.call("metrics").result(timeout))

    def close(self) -> None:
        """Detach, and stop the core if this session spawned it. May be called twice."""
        if not self._closed.acquire(blocking=False):
            return
        self._requests.close()
        self.stat_loggers.stop()
        if self._tracer is not None:
            self._tracer.shutdown()

    @property
    def dead(self) -> EngineDeadError | None:
        """The error with which the core was lost, until another core replaces it; None while there is a core."""
        return self._requests.connection.dead

    @property
    def gone(self) -> Future[EngineDeadError]:
        """Gets the error when the core is lost for good; cancelled if the session is closed before."""
        return self._requests.gone

    @property
    def connection(self) -> Cores:
        """The connection to the core, or to several."""
        return self._requests.connection

    @property
    def _spawned(self) -> CoreProcess | None:
        return self._requests.connection.spawned


class Face(Protocol):
    """What users hold: `LLM`, `LLMEngine` or `AsyncLLM`."""

    @classmethod
    def _over(cls, session: Session) -> Self:
        """Make one that uses a session."""


class AttachMethod(Generic[P]):
    """A classmethod that calls `Session.attach`, and returns a `Face` over the session that it makes."""

    def __init__(self, attach: Callable[P, Session]) -> None:
        self._attach = attach

    def __get__(self, instance: object, face: type[F]) -> Callable[P, F]:
        @wraps(self._attach)
        def attach(*args: P.args, **kwargs: P.kwargs) -> F:
            return face._over(self._attach(*args, **kwargs))

        return attach


def state_of(
    item: Prepared, tokenizer: Tokenizer | None, logprob_budget: LogprobBudget | None
) -> RequestState:
    """The state of a request that is to be sent. logprob_budget: see `Session.submit`."""
    if isinstance(item.request.task, PoolingParams):
        pooled: RequestState = wiring.PooledState(item.request)
        return pooled
    return RequestState(
        item.request,
        item.prompt_text,
        tokenizer,
        logprob_budget,
        item.adapter,
        item.num_virtual_tokens,
        item.source,
    )


def media_of(info: EngineInfo, access: MediaAccess, call: Callable[..., Future[Any]]) -> MediaPlacer | None:
    """What puts media into prompts; None if the engine takes none. call: sends a call to the engine."""
    if info.media is None:
        return None
    placer: MediaPlacer = wiring.media_intake(info.media, access, call, info.max_model_len)
    return placer


def tokenizer_of(info: EngineInfo, name: str | None, source: dict[str, Any]) -> Tokenizer | None:
    """Load the tokenizer `name`, or the core's; None without a name if the core skips tokenizers.

    source: further options of `load_tokenizer`, which says what it raises.
    """
    if name is None and info.skip_tokenizer_init:
        return None
    revision = None if name else info.tokenizer_revision
    return load_tokenizer(name or info.tokenizer, info.tokenizer_mode, revision=revision, **source)


def ignore_usage_context(usage_context: Any) -> None:
    """Log a warning if a usage context is given: no usage statistics are collected."""
    if usage_context is not None:
        logger.warning("usage_context has no effect: usage statistics are never collected")
