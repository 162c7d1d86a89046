"""The calls that a frontend makes by name: their arguments, what they do, and which process runs them.

    LLM.sleep(1) --Call("sleep", [1])--> core: WorkerSleep.sleep --WorkerCall--> worker: calls.sleep

`CALLS` has them all. To add a call, declare it in a class below, and implement it under its name in `Control`
(`engine_core/calls/control.py`) or a class that it lists, in `workers/process/calls.py`, or in both. What
`EngineCalls` declares is also a method of `LLM` and `LLMEngine`; `AsyncLLM` gets it by one line in
`frontend/api/calls.py`.

A frontend checks arguments before it sends them, and the core and the worker check what comes, by the same table.
"""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import NoneType
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from pagewire.ipc.bounds import convert_value
from pagewire.ipc.compatibility import KnowsAttributes
from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.wire.budget import MAX_NAME_CHARS, MAX_OPTIONS_CHARS, MAX_WEIGHT_BYTES
from pagewire.ipc.wire.items import TensorForm, WeightFile
from pagewire.ipc.wire.lora import MAX_PATH_CHARS, AdapterId, AdapterName, AdapterPath, AdapterVersion
from pagewire.ipc.wire.media import MediaLayout

P = ParamSpec("P")
R = TypeVar("R")

LONG_SECONDS = 60.0  # workers show progress in a call that declares a longer time limit
PROMPT_SECONDS = 10.0  # of calls that the core answers by itself, as soon as it has taken the requests before
MAX_NAMES_BYTES = 1 << 15  # of KV blocks in one call: 1024 names
IDENTITY_BYTES = 32  # a hash of what KV blocks depend on beside their names
TICKET_BYTES = 8  # at the beginning of an answer with blocks


class RunsIn(Enum):
    """The process that runs a call."""

    CORE = "the core"
    WORKER = "every worker; the core passes it on and answers the list of their results"
    BOTH = "the core, which calls the method of the same name of the worker"


class Right(Enum):
    """A right that a frontend may have; the value is its name in a file of rights."""

    READ = "read"
    """See the state of the engine, its metrics, and the ids of all requests."""
    GENERATE = "generate"
    """Submit requests, and end its own."""
    EVENTS = "events"
    """Follow the names of cached blocks, with which guesses at the prompts of others can be checked."""
    BLOCKS = "blocks"
    """Take cached KV blocks by their names, as a core does of another one."""
    CONTROL = "control"
    """Pause the engine and put it to sleep, end the requests of others, call and profile workers."""


class RemoteCall(msgspec.Struct, frozen=True, dict=True):
    """One call. What its method's signature says is read when the call is first made.

    Attributes:
        name: on the wire. runs_in: the process that implements it. right: what a frontend needs to make it.
        method: declares it, by its signature and docstring. unsent: arguments that stay in the frontend.
        bounds: of arguments, with their descriptions.
        seconds: time limit; None: that of a step (`PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S`). Then the core answers
            TimeoutError; a worker that has not answered counts as hung. It does so sooner if it shows no progress
            for the time limit of a step, whatever is declared. A core that runs the call itself, and does not
            answer in time, is lost to its frontends (`frontend.open_calls`).
        overtakes: the core runs it before requests that the same frontend sent earlier, where they still wait.
    """

    name: str
    runs_in: RunsIn
    right: Right
    method: Callable[..., Any]
    unsent: tuple[str, ...]
    bounds: Mapping[str, Meta]
    seconds: float | None
    overtakes: bool

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The method's, without `self`."""
        _, *parameters = inspect.signature(self.method).parameters.values()
        return inspect.Signature(parameters)

    @functools.cached_property
    def sent(self) -> inspect.Signature:
        """The same without what stays in the frontend."""
        parameters = self.signature.parameters.values()
        return inspect.Signature([each for each in parameters if each.name not in self.unsent])

    @functools.cached_property
    def types(self) -> Mapping[str, Any]:
        """The types of all arguments by name, with bounds and description."""
        return {
            name: Annotated[kind, self.bounds[name]] if name in self.bounds else kind
            for name, kind in get_type_hints(self.method).items()
            if name != "return"
        }

    @functools.cached_property
    def result(self) -> Any:
        """The type that the method returns; NoneType: nothing."""
        return get_type_hints(self.method)["return"]

    @property
    def shows_progress(self) -> bool:
        """True if workers send signs of progress while they run it, since it may take longer than a step."""
        return self.runs_in is not RunsIn.CORE and (self.seconds or 0.0) > LONG_SECONDS

    def local(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The given arguments of the method that stay in the frontend.

        Raises:
            TypeError: an argument too many, unknown or missing.
        """
        given = self._bind(self.signature, args, kwargs).arguments
        return {name: value for name, value in given.items() if name not in self.sent.parameters}

    def pack(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The method's arguments, checked, as a message carries them: all, by position.

        Raises:
            TypeError, ValueError: as `receive`.
        """
        bound = self._bind(self.signature, args, kwargs)
        bound.apply_defaults()
        return list(self._checked(bound.arguments).values())

    def receive(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments in a message, by name, checked; what the message leaves out has its default.

        Raises:
            TypeError: an argument too many, unknown, missing, or of another type.
            ValueError: one out of its bounds.
        """
        bound = self._bind(self.sent, args, kwargs)
        bound.arguments = self._checked(bound.arguments)
        bound.apply_defaults()
        return bound.arguments

    def answer(self, result: Any) -> Any:
        """The value that the method returns, made of the core's answer.

        Raises:
            ProtocolError: an answer of another type.
        """
        if self.result is NoneType:
            return None
        try:
            return msgspec.convert(result, self.result)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the answer to {self.name} is of another type: {error}") from None

    def _bind(
        self, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> inspect.BoundArguments:
        try:
            return signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None

    def _checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: convert_value(f"{self.name}: {name}", value, self.types[name])
            for name, value in arguments.items()
            if name in self.sent.parameters
        }


CALLS: dict[str, RemoteCall] = {}  # by name
DECLARED: dict[Any, RemoteCall] = {}  # by the method that declares it


class Caller(KnowsAttributes):
    """Base of what declares calls. A subclass says how the answer of the core is waited for."""

    def _answer(self, call: RemoteCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Send the call and wait for the core's answer. The arguments are those of the method that declares it."""
        raise NotImplementedError


C = TypeVar("C", bound=Caller)


def remote(
    runs_in: RunsIn,
    name: str = "",
    local: tuple[str, ...] = (),
    seconds: float | None = None,
    right: Right = Right.CONTROL,
    overtakes: bool = False,
    **arguments: Meta,
) -> Callable[[Callable[Concatenate[C, P], R]], Callable[Concatenate[C, P], R]]:
    """Declare a call: put it into `CALLS`, and give the method its body, which calls and waits for the answer.

    name: on the wire, if not the method's. local: arguments that stay in the frontend. seconds: its time limit.
    right: needed to call it. overtakes: it does not wait for the frontend's earlier requests.
    arguments: bounds and description of arguments.
    """

    def declare(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
        name_sent = name or method.__name__
        call = RemoteCall(name_sent, runs_in, right, method, local, arguments, seconds, overtakes)
        CALLS[call.name] = call

        @functools.wraps(method)
        def wait(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
            answer: R = call.answer(self._answer(call, args, kwargs))
            return answer

        DECLARED[wait] = call
        return wait

    return declare


class EngineCalls(Caller):
    """The calls that act on the engine as a whole, for callers that wait for the answer."""

    @remote(
        RunsIn.CORE,
        name="pause",
        seconds=3600.0,
        wait_for_inflight_requests=Meta(description="wait for those that run (default: they are aborted)"),
        clear_cache=Meta(description="forget cached prefixes as well (default: true)"),
    )
    def pause_generation(self, wait_for_inflight_requests: bool = False, clear_cache: bool = True) -> bool:
        """Hold new requests back until `resume_generation`; returns True once no request of any frontend runs.

        Returns False if `resume_generation` comes first, from whichever frontend; then nothing is forgotten.

        wait_for_inflight_requests: let those that run finish; else they end with the finish reason "abort".
        clear_cache: forget cached prefixes as well.

        Raises:
            TimeoutError: some still run after an hour; new ones are held back until `resume_generation`.
        """

    @remote(RunsIn.CORE, name="resume")
    def resume_generation(self) -> None:
        """Let requests run again."""

    @remote(RunsIn.CORE, right=Right.READ)
    def is_paused(self) -> bool:
        """True between `pause_generation` and `resume_generation`."""

    @remote(
        RunsIn.CORE,
        local=("device",),
        reset_running_requests=Meta(description="recompute running requests that use them"),
    )
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, device: str | int | None = None
    ) -> bool:
        """Forget cached prefixes. False if running requests still use them.

        reset_running_requests: preempt those requests, and compute them anew; then no prefix is in use.
        device: without effect: there is one cache, over all devices of the engine.
        """

    @remote(
        RunsIn.CORE,
        right=Right.GENERATE,
        session=Meta(max_length=MAX_NAME_CHARS, description="the name that the promises were given"),
        tenant=Meta(max_length=MAX_NAME_CHARS, description="whose they are (default: this frontend's own)"),
    )
    def release_prefixes(self, session: str, tenant: str = "") -> int:
        """End the promises that a session's prefixes stay cached: their blocks may be evicted then.

        session: the name that requests gave (`Retention.name`).
        tenant: whose promises they are; empty: those of this frontend's requests without a tenant.

        Returns how many tokens are not promised to the tenant any more; 0 if there are no such promises.

        Raises:
            ValueError: no tenant has such a name.
        """

    @remote(RunsIn.CORE)
    def reset_mm_cache(self) -> None:
        """Forget what is kept of pictures and sound: their features, and what the model's encoder has made of them.

        Running requests keep theirs. Cached prefixes stay: `reset_prefix_cache` forgets those.
        """

    @remote(
        RunsIn.BOTH,
        seconds=3600.0,  # packed weights are written first, if they still are to be
        level=Meta(ge=1, le=2, description="1: give weights and KV cache back; 2: end the workers as well"),
        tags=Meta(
            description="what to give back at level 1: kv_cache, or weights, and with them the cache (default: all)"
        ),
    )
    def sleep(self, level: int = 1, tags: list[str] | None = None) -> None:
        """Give memory back: at level 1 that of weights and KV cache, at level 2 all of the workers, which end.

        At level 1 `tags` may name a part: "kv_cache", or "weights", with which the cache goes, too. Requests that
        come meanwhile wait for `wake_up`, or are refused (option `while_asleep`).

        Raises:
            ValueError: another level, or an unknown tag. EngineBusyError: requests are unfinished.
            TimeoutError: the workers have not done it within an hour, or show no progress for the time limit of a
                step; they are replaced, awake.
        """

    @remote(
        RunsIn.BOTH,
        seconds=3600.0,  # the weights may come from a slow disk
        tags=Meta(description="what to take again: weights, or kv_cache, which takes both (default: all)"),
    )
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory again; all of it, or what `tags` name ("weights"; "kv_cache", which takes both).

        After `sleep(2)` this starts workers. Requests run again once nothing is left to take. Without `sleep`
        before, nothing happens.

        Raises:
            ValueError: an unknown tag. RuntimeError: the workers cannot be started, the weights not be read, or
                there is too little memory now; it still sleeps.
            TimeoutError: the workers have not done it within an hour, or show no progress for the time limit of a
                step; they are replaced, and still asleep.
        """

    @remote(RunsIn.CORE, right=Right.READ)
    def is_sleeping(self) -> bool:
        """True from `sleep` until all memory has been taken again by `wake_up`."""

    @remote(RunsIn.CORE, name="abort_request")
    def abort_any(self, request_id: str, frontend: int | None = None) -> int:
        """End the requests with this id, of any frontend or of the one with this number in the core's `status`.

        Their outputs end with the finish reason "abort". Returns how many sequences were ended; 0: there is no
        such request, or it has ended.
        """

    @remote(RunsIn.CORE, local=("timeout",))
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name; the results in the order of the workers.

        method: one of `WorkerCalls`, or of the class that the option `worker_extension` names.

        timeout: seconds to wait for the answer; None: as long as the core does. Workers that have not answered
            within the time limit of a step, or of the call if it declares a longer one, are replaced.

        Raises:
            TypeError: a callable (code never crosses a socket), or arguments that msgpack cannot hold.
            ValueError: no such method, over a megabyte of arguments, or a method in which the core takes part, such
                as `sleep`: call that itself.
            TimeoutError: no answer in time. EngineBusyError: too many calls wait.
            And what the method raises, by name.
        """

    @remote(
        RunsIn.WORKER,
        seconds=3600.0,  # the weights may come from a slow disk
        path=Meta(description="folder of the workers' machines; each worker writes its part into it"),
        pattern=Meta(description="names of files (default: model-rank-{rank}-part-{part}.safetensors)"),
        max_size=Meta(ge=1, description="bytes of a file (default: 1 GiB)"),
    )
    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int = 1 << 30) -> None:
        """Write each worker's part of the weights, for `load_format="sharded_state"` with as many workers.

        They load it in as many stages, too.

        path: a folder, on every worker's machine, below `allowed_save_path`.
        pattern: the names of files, with {rank} and {part}. max_size: bytes of a file.

        Raises:
            ValueError: the pattern names no file for each rank and part, or the model is no folder of safetensors
                files, or the folder holds such a model already.
            PermissionError: the engine's option `allowed_save_path` does not let the path be written.
        """

    @remote(RunsIn.CORE)
    def remove_lora(self, lora_id: AdapterId) -> bool:
        """Unload the adapter with this id: its requests finish, then it leaves memory. False if there is none.

        A later request that gives its path loads it again.
        """

    @remote(RunsIn.CORE, right=Right.READ)
    def list_loras(self) -> list[int]:
        """The ids of the adapters that were added, or are in memory; in ascending order, each once."""

    @remote(RunsIn.CORE)
    def pin_lora(self, lora_id: AdapterId) -> bool:
        """Keep the adapter with this id in memory. Returns True once it is there.

        Raises:
            ValueError: there is none with this id, it cannot be loaded, or others would have no room.
        """

    @remote(RunsIn.WORKER, seconds=600.0)  # it loads and prepares much, which is not part of steps
    def start_profile(self) -> None:
        """Start the workers' profilers.

        Raises:
            RuntimeError: they run already.
        """

    @remote(RunsIn.WORKER, seconds=3600.0)  # a trace may have millions of events
    def stop_profile(self) -> None:
        """Stop the workers' profilers; each writes a trace into a file in `$PAGEWIRE_TORCH_PROFILER_DIR`.

        Raises:
            RuntimeError: they do not run.
        """


class AdapterCalls(Caller):
    """The calls behind `add_lora` and the adapters of a server."""

    @remote(
        RunsIn.CORE,
        path=Meta(description="its folder, absolute, on the workers' machines"),
        version=Meta(description="of the folder's files; another one is read anew"),
    )
    def register_adapter(
        self, name: AdapterName, adapter_id: AdapterId, path: AdapterPath, version: AdapterVersion = ""
    ) -> bool:
        """Read a LoRA adapter, and let requests of any frontend name it. Returns True once it was read.

        An adapter of the same name is replaced; its requests finish with the old one.

        Raises:
            ValueError: it cannot be read or does not fit the model, its id is that of another name, or no adapters
                are served. PermissionError: this frontend may not name paths.
        """

    @remote(RunsIn.CORE, right=Right.READ)
    def adapters(self) -> list[dict[str, Any]]:
        """The adapters that are registered: name, adapter_id, path, resident, num_bytes, rank, pinned."""


class WeightCalls(Caller):
    """The calls behind `update_weights`. Weights come from a file, or piece by piece from a frontend."""

    @remote(
        RunsIn.CORE,
        seconds=3600.0,  # requests may run for long, and the weights may come from a slow disk
        path=Meta(
            max_length=MAX_PATH_CHARS,
            description="a safetensors file, or a folder of some, below the engine's weights_dir",
        ),
        upload=Meta(ge=0, description="the number that `begin_weights` answered; 0: there is a path"),
        version=Meta(max_length=MAX_NAME_CHARS, description="a name for outputs to say; default: a number"),
        requests=Meta(description="what becomes of those that run: finish, recompute or abort"),
    )
    def update_weights(
        self,
        path: str = "",
        upload: int = 0,
        version: str = "",
        requests: Literal["finish", "recompute", "abort"] = "finish",
    ) -> str:
        """Run with other weights from now on; returns their version.

        Raises:
            ValueError: a tensor that the model does not have, or with another shape or dtype; nothing is changed.
                Or the model's weights cannot be replaced.
            PermissionError: the path is not below `weights_dir`, or a link.
            EngineBusyError: another update is going on, or the engine sleeps.
            TimeoutError: requests still run after an hour; the weights stay as they are.
        """

    @remote(RunsIn.CORE, seconds=600.0)  # the first one asks the workers what the model has
    def begin_weights(self, tensors: list[TensorForm]) -> int:
        """Begin to send weights: these tensors, one behind the other. Returns the number of the upload.

        An upload that this frontend had begun is dropped.

        Raises:
            ValueError: a tensor that the model does not have, or with another shape or dtype.
            EngineBusyError: another frontend sends weights.
        """

    @remote(
        RunsIn.CORE,
        offset=Meta(ge=0, description="how many bytes came before"),
        data=Meta(min_length=1, max_length=MAX_WEIGHT_BYTES, description="the next bytes"),
    )
    def send_weights(self, upload: int, offset: int, data: bytes) -> int:
        """Send the next bytes of an upload; returns how many there are now.

        Raises:
            ValueError: there is no such upload of this frontend, or other bytes come next. OSError: no room.
        """

    @remote(RunsIn.BOTH, seconds=3600.0)
    def load_weights(self, files: list[WeightFile]) -> None:
        """Load the model anew, with the tensors of these files in place of its own; for the core alone.

        Raises:
            PermissionError: a frontend calls it.
        """


class HealthReport(TypedDict):
    """The answer to `check_health`, which describes it."""

    alive: bool
    ready: bool
    reason: str


class ReportCalls(Caller):
    """The calls by which the core reports on itself, for monitoring."""

    @remote(RunsIn.CORE, right=Right.READ, seconds=60.0, overtakes=True)
    def check_health(self) -> HealthReport:
        """Whether the engine is proven to live, and whether it takes requests.

        alive: every worker has finished a step or answered a ping within seconds (`PAGEWIRE_HEALTH_TIMEOUT_S`).
        ready: alive, and neither asleep, nor paused, nor shutting down. reason: why not; empty if ready.
        """

    @remote(RunsIn.CORE, right=Right.READ, seconds=PROMPT_SECONDS)
    def metrics(self) -> list[dict[str, Any]]:
        """The value of every metric of the core: counters, gauges and histograms, over all frontends."""

    @remote(RunsIn.CORE, right=Right.READ, seconds=PROMPT_SECONDS)
    def status(self) -> dict[str, Any]:
        """The state of scheduler, KV cache and worker, and each frontend. Counts begin at the core's start.

        running, waiting: sequences, of which a request has n. (The metrics count requests.)
        """

    @remote(RunsIn.CORE, right=Right.READ, seconds=PROMPT_SECONDS)
    def requests(self, limit: int = 1000) -> list[dict[str, Any]]:
        """At most `limit` unfinished sequences of all frontends, those that run before those that wait."""


class EventCalls(Caller):
    """The calls by which a frontend gets messages that it has not requested one by one."""

    @remote(RunsIn.CORE, right=Right.EVENTS, seconds=PROMPT_SECONDS)
    def follow_blocks(self) -> bool:
        """Get a snapshot of the names of cached KV blocks, and what comes and goes from then on (`Blocks`).

        Called again, it begins anew with a snapshot. Returns False if no prefixes are shared between requests
        (`enable_prefix_caching`): then nothing follows.
        """


class FlowCalls(Caller):
    """The calls that frontends make by themselves."""

    @remote(RunsIn.CORE, right=Right.GENERATE, seconds=PROMPT_SECONDS)
    def fence(self) -> None:
        """Answered when the core has taken the requests that the same frontend sent earlier (`ipc.window`)."""

    @remote(
        RunsIn.CORE,
        right=Right.GENERATE,
        seconds=120.0,  # the first one waits for the start of the model's processor
        overtakes=True,
        kind=Meta(description="image or audio"),
        shape=Meta(min_length=1, max_length=4, description="of the decoded content"),
        options=Meta(
            max_length=MAX_OPTIONS_CHARS, description="the processor's arguments, as canonical JSON"
        ),
        tenant=Meta(max_length=MAX_NAME_CHARS, description="for whom, as of requests; none: this frontend"),
    )
    def media_layout(self, kind: str, shape: list[int], options: str = "", tenant: str = "") -> MediaLayout:
        """The tokens that stand in a prompt in place of one placeholder, for a medium of this kind and shape.

        Raises:
            ValueError: the engine takes no media of this kind, or its processor none of this shape or with these
                options; or no prompt has room for them.
        """


IDENTITY = Meta(max_length=IDENTITY_BYTES, description="of the blocks: model, layout and code")
NAMES = Meta(max_length=MAX_NAMES_BYTES, description="one behind the other")


class PeerCalls(Caller):
    """The calls by which a core takes KV blocks of another one (`--kv-peers`)."""

    @remote(
        RunsIn.CORE,
        right=Right.BLOCKS,
        seconds=PROMPT_SECONDS,
        overtakes=True,
        identity=IDENTITY,
        names=NAMES,
    )
    def find_blocks(self, identity: bytes, names: bytes) -> bytes:
        """Which blocks with these names are there, in memory or on disk: a byte for each name, 0 or 1.

        Raises:
            ValueError: these are no names.
        """

    @remote(
        RunsIn.CORE,
        right=Right.BLOCKS,
        seconds=PROMPT_SECONDS,
        overtakes=True,
        identity=IDENTITY,
        names=NAMES,
        ticket=Meta(max_length=TICKET_BYTES, description="of the last answer that was read; empty: of none"),
    )
    def fetch_blocks(self, identity: bytes, names: bytes, ticket: bytes = b"") -> bytes:
        """The blocks with these names: a ticket, then an entry for each that is there, with checksums.

        Answers at most `PART_BYTES` of blocks, but always one; those that are behind are left out. With the ticket
        the caller says what it has read, so that no more than `MAX_PARTS` answers wait for it.

        Raises:
            ValueError: these are no names.
            EngineBusyError: that many answers are not read yet, or too many other cores wait for blocks.
        """


class WorkerCalls(Caller):
    """The other methods of a worker, for `collective_rpc`."""

    @remote(RunsIn.WORKER, right=Right.READ, seconds=60.0)
    def ping(self) -> str:
        """Answers "pong"."""

    @remote(RunsIn.WORKER, right=Right.READ, seconds=60.0)
    def weight_tensors(self) -> list[TensorForm]:
        """The tensors of the model's checkpoint, which `update_weights` can replace.

        Raises:
            ValueError: its weights cannot be replaced; the text says why.
        """

    @remote(RunsIn.WORKER, right=Right.READ)
    def memory(self) -> dict[str, int]:
        """Bytes of memory: of the device, of the worker process, of weights and KV cache."""

    @remote(RunsIn.WORKER, right=Right.READ)
    def model_info(self) -> dict[str, Any]:
        """The loaded model: architecture, dtype, and the sizes of model and KV cache."""
