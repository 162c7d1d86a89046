"""All messages between processes.

    frontend --ToCore--> engine core --ToWorker--> worker
    frontend <--ToFrontend-- engine core <--FromWorker-- worker

A message is a tagged map, so an unknown one is detected and a dump is readable. The numerous items in it (rows,
deltas, requests) are arrays, which are compact. Increase `PROTOCOL` with every change that an older peer could
misread.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from pagewire.ipc.codec import Tensor
from pagewire.ipc.params import PoolingParams, SamplingParams

PROTOCOL = 3


class Item(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Base of numerous items in messages: encoded by position, and not tracked by the garbage collector."""


class Message(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Base of messages: encoded as a map with a tag."""


# ---------------------------------------------------------------- shared parts


class LogprobRows(Item):
    """Log probabilities at n positions. Column 0 is the actual token, the others are the k most likely tokens.

    token_ids: int32 [n, 1 + k]; logprobs: float32 [n, 1 + k]; ranks: int32 [n], 1 = most likely.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    def first(self, count: int) -> LogprobRows:
        """The first `count` of the n positions."""
        if count == self.ranks.shape[0]:
            return self
        return LogprobRows(*(_first(tensor, count) for tensor in (self.token_ids, self.logprobs, self.ranks)))

    @staticmethod
    def join(parts: list[LogprobRows]) -> LogprobRows | None:
        """The positions of all parts, in order; None if there are no parts. All parts have the same k."""
        if len(parts) <= 1:
            return parts[0] if parts else None
        return LogprobRows(
            _joined([part.token_ids for part in parts]),
            _joined([part.logprobs for part in parts]),
            _joined([part.ranks for part in parts]),
        )


def _first(tensor: Tensor, count: int) -> Tensor:
    size = len(tensor.data) // tensor.shape[0]
    return Tensor(tensor.dtype, (count, *tensor.shape[1:]), tensor.data[: count * size])


def _joined(parts: list[Tensor]) -> Tensor:
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Tensor(parts[0].dtype, shape, b"".join(bytes(part.data) for part in parts))


class Media(Item):
    """A picture, a sound or the like, which takes the place of some tokens of a prompt.

    start, num_tokens: the tokens that it takes the place of; no step computes only a part of them.
    name: sha256 of its content, by which its keys and values are shared.
    data: the content, which the core hands on unopened.
    """

    start: int
    num_tokens: int
    name: bytes
    data: Tensor


class Prompt(Item):
    """Everything that the keys and values of a request's prompt depend on.

    media: in the order of `start`, apart from each other. adapter: sha256 of the content of an adapter of the
    model's weights; empty for none. cache_salt: requests share cached prefixes only if their salts are equal.
    """

    token_ids: list[int]
    media: list[Media] = []
    adapter: bytes = b""
    cache_salt: str | None = None

    def block_keys(self, index: int, block_size: int) -> list[tuple[str | bytes | int, ...]]:
        """What KV block `index` depends on beside its tokens and the blocks before it.

        Salt and adapter are keys of the first block, and so of all, because names of blocks are chained. A medium
        is a key of every block that it touches, with its place relative to the block.
        """
        keys: list[tuple[str | bytes | int, ...]] = []
        if index == 0 and self.cache_salt:
            keys.append(("salt", self.cache_salt))
        if index == 0 and self.adapter:
            keys.append(("adapter", self.adapter))
        begin = index * block_size
        for medium in self.media:
            if medium.start < begin + block_size and medium.start + medium.num_tokens > begin:
                keys.append(("media", medium.name, medium.start - begin, medium.num_tokens))
        return keys


Task: TypeAlias = SamplingParams | PoolingParams


class EngineInfo(Message):
    """The properties of an engine that frontends need. tokenizer: folder or hub repository of its tokenizer."""

    model: str
    model_path: str
    tokenizer: str
    served_model_names: list[str]
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_logprobs: int
    max_n: int
    seed: int
    eos_token_id: int | None
    generation_config: dict[str, Any]
    trust_remote_code: bool = False
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    startup_seconds: dict[str, float] = {}
    tokenizer_revision: str | None = None
    scheduling_policy: str = "fcfs"


# ---------------------------------------------------------------- frontend -> core


class Hello(Message, tag="hello"):
    """Attach: the first message of a frontend."""

    protocol: int
    version: str
    pid: int
    name: str = ""


class Request(Item):
    """What a frontend submits, once: a prompt, and what to do with it.

    key: chosen by the frontend, unique among its unfinished requests; deltas carry it.
    request_id: the public id, for logs.
    task: parameters of n sequences to generate, or of a pooled result.
    seed: always set (the frontend chooses one if the user gave none); sequence i of n samples with a seed derived
        from (seed, i).
    output_token_ids: the tokens generated so far, for each sequence (a resubmission after the core was lost).
    num_prompt_logprobs: the prompt positions, from position 1 on, whose log probabilities were delivered before.
    age: seconds between its arrival and its submission; the core dates the arrival back by it.
    """

    key: int
    request_id: str
    prompt: Prompt
    task: Task
    seed: int
    eos_token_id: int | None = None
    priority: int = 0
    output_token_ids: list[list[int]] | None = None
    num_prompt_logprobs: int = 0
    age: float = 0.0

    @property
    def params(self) -> SamplingParams:
        """The parameters of a request that generates."""
        assert isinstance(self.task, SamplingParams), "the request is for a pooled result"
        return self.task


class Submit(Message, tag="submit"):
    """New requests, in order of arrival."""

    requests: list[Request]


class Abort(Message, tag="abort"):
    """End requests or single sequences. No delta follows; unknown keys are ignored.

    keys: requests to abort. sequences: (key, index) pairs to end with finish reason "stop", because the frontend
        found a stop string.
    """

    keys: list[int] = []
    sequences: list[tuple[int, int]] = []


class Call(Message, tag="call"):
    """Ask for one of the core's methods by name; answered by `CallAnswer` with the same `call_id`."""

    call_id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Ping(Message, tag="ping"):
    """A frontend's heartbeat; the core sends `Pong` at regular intervals of its own."""


class Goodbye(Message, tag="goodbye"):
    """Detach: the frontend's requests end, and nothing more is sent to it."""


# ---------------------------------------------------------------- core -> frontend


class Welcome(Message, tag="welcome"):
    """The answer to `Hello`. ping_seconds: the interval at which the frontend should send `Ping`."""

    info: EngineInfo
    version: str
    ping_seconds: float


class Refused(Message, tag="refused"):
    """A message was refused; `error` says why. As the answer to `Hello`: the frontend is not attached.

    error_type: name of the exception (`ipc.errors.ERROR_TYPES`), such as the one for which the core did not start.
    """

    error: str
    error_type: str = "ProtocolError"


class RequestTiming(Item):
    """When a sequence reached each state, in seconds on the core's monotonic clock."""

    arrived: float
    scheduled: float
    first_token: float
    finished: float


class TokenDelta(Item):
    """New output of one sequence of a request.

    finish_reason: "stop", "length", "abort" or "error"; None while the sequence continues.
    stop_reason: the stop token, if one of `stop_token_ids` ended the sequence.
    prompt_logprobs: for the next prompt positions (from position 1 on); only for index 0.
    pooled: the result of a request with `PoolingParams`; its finish_reason is "stop".
    num_cached_tokens, timing: set in the first and in the last delta of the sequence.
    error, error_type: why the sequence failed; if it was refused, also the name of the exception ("ValueError",
        "EngineBusyError").
    """

    key: int
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    pooled: Tensor | None = None
    num_cached_tokens: int | None = None
    timing: RequestTiming | None = None
    error: str | None = None
    error_type: str | None = None


class Deltas(Message, tag="deltas"):
    """All new output for one frontend."""

    deltas: list[TokenDelta]


class CallAnswer(Message, tag="reply"):
    """Answer to a `Call`: a result, or an error with the name of its type."""

    call_id: int
    result: Any = None
    error: str | None = None
    error_type: str | None = None


class Pong(Message, tag="pong"):
    """The core's heartbeat, sent to every frontend at regular intervals."""


class CoreDying(Message, tag="dying"):
    """The core is ending; all open requests end with this cause."""

    cause: str


# ---------------------------------------------------------------- core -> worker


class WorkerConfig(Message, tag="load"):
    """Load the model and allocate the KV cache; answered by `Ready`. None: the worker decides."""

    model_path: str
    dtype: str = "auto"
    device: str = "cpu"
    load_format: str = "auto"
    trust_remote_code: bool = False
    hf_overrides: dict[str, Any] = {}
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    num_threads: int | None = None
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"


class SlotInit(Item):
    """Assigns a slot to a sequence, with everything the worker needs to run it.

    token_ids: the prompt and the tokens generated so far. num_prompt_tokens: length of the prompt.
    block_ids: its KV blocks, in order. The first row starts after the prefix that is cached in them.
    media: those of the prompt. seed: of this sequence.
    stop_ids: EOS and stop tokens, excluded until `min_tokens` are generated.
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    task: Task
    seed: int
    stop_ids: list[int] = []
    media: list[Media] = []


class Row(Item):
    """A sequence's part of a step: run tokens [start, start + num_tokens) of its slot.

    new_block_ids: appended to the slot's blocks before the step.
    drafts: proposed tokens, which are the last len(drafts) of the row's tokens and are not in the slot.
    num_samples: 0, or 1 + len(drafts): sample the token after each of the last `num_samples` tokens. The samples up
        to the first that is no draft are appended to the slot.
    num_prompt_logprobs: return log probabilities of the tokens that follow the first num_prompt_logprobs of these.
    pool: the row's hidden states go into the sequence's pooled result; the row that ends its prompt returns it.
    """

    slot: int
    start: int
    num_tokens: int
    new_block_ids: list[int] = []
    drafts: list[int] = []
    num_samples: int = 0
    num_prompt_logprobs: int = 0
    pool: bool = False


class StepPlan(Message, tag="plan"):
    """One step: free slots, then assign slots, then run the rows as one batch.

    In each layer all KV writes of the batch must come before all reads, since rows may share blocks that this same
    step fills.

    masked: wait for the step's `Masks` before sampling; the core sends them when it knows the tokens of earlier
        steps.
    """

    step_id: int
    rows: list[Row]
    inits: list[SlotInit] = []
    freed_slots: list[int] = []
    masked: bool = False


class Masks(Message, tag="masks"):
    """The allowed tokens of samples under a grammar; sent while the worker runs the step.

    samples: indices into the samples of the plan, counted over its rows in order; the others may be any token.
    bits: int32 [len(samples), ceil(V / 32)]: bit i % 32 of word i // 32 is set if token i is allowed.
    """

    step_id: int
    samples: list[int]
    bits: Tensor


class WorkerCall(Message, tag="call"):
    """Call a worker's method by name; answered by `WorkerReply`."""

    call_id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Shutdown(Message, tag="shutdown"):
    """Exit with status 0."""


# ---------------------------------------------------------------- worker -> core


class WorkerHello(Message, tag="hello"):
    """A worker process has started and waits for `WorkerConfig`."""

    protocol: int
    pid: int


class Progress(Message, tag="progress"):
    """A phase of the worker's start has ended; it took `seconds`."""

    phase: str
    seconds: float


class Ready(Message, tag="ready"):
    """The model is loaded and the KV cache allocated; the fields describe them."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    bytes_per_block: int
    weight_bytes: int
    eos_token_id: int | None = None
    startup_seconds: dict[str, float] = {}
    memory: dict[str, int] = {}


class RowResult(Item):
    """The result of a row.

    token_ids: 1 to `Row.num_samples` tokens; all but the last are the row's drafts, in order. None without samples.
    logprobs: of these tokens. prompt_logprobs: as many as the row says. pooled: if the row ends a prompt to pool.
    error: why the row has no tokens; the other fields are then empty.
    """

    token_ids: list[int] = []
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    pooled: Tensor | None = None
    error: str | None = None


class StepResult(Message, tag="result"):
    """The result of a step.

    rows: one for each of the plan's rows.
    busy_us: duration of the step in the worker, in microseconds. idle_us: time the worker had waited for it.
    """

    step_id: int
    rows: list[RowResult]
    busy_us: int = 0
    idle_us: int = 0


class WorkerReply(Message, tag="reply"):
    """Answer to a `WorkerCall`."""

    call_id: int
    result: Any = None
    error: str | None = None
    error_type: str | None = None


class WorkerFailed(Message, tag="failed"):
    """The worker exits because of `error`. fatal: starting it again would fail the same way.

    error_type: name of the exception (`ipc.errors.ERROR_TYPES`).
    """

    error: str
    traceback: str = ""
    fatal: bool = False
    error_type: str = "RuntimeError"


ToCore: TypeAlias = Hello | Submit | Abort | Call | Ping | Goodbye
ToFrontend: TypeAlias = Welcome | Refused | Deltas | CallAnswer | Pong | CoreDying
ToWorker: TypeAlias = WorkerConfig | StepPlan | Masks | WorkerCall | Shutdown
FromWorker: TypeAlias = WorkerHello | Progress | Ready | StepResult | WorkerReply | WorkerFailed
