"""Every message that crosses a socket.

    frontend --ToCore--> engine core --ToWorker--> worker
    frontend <--ToFrontend-- engine core <--FromWorker-- worker

A message is a tagged map, so that a foreign one is known at once and a dump can be read; what it carries in
numbers each step (rows, deltas, requests) are arrays. A change here that an older peer could misread raises
`PROTOCOL`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from pagewire.ipc.codec import Tensor
from pagewire.ipc.params import SamplingParams

PROTOCOL = 2


class Item(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Base of what messages carry in numbers: positional on the wire, untracked by the garbage collector."""


class Message(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Base of what is sent: a map with a tag."""


# ---------------------------------------------------------------- shared parts


class LogprobRows(Item):
    """Log probabilities for n tokens. Column 0 is the token itself, then the k most likely ones.

    token_ids: int32 [n, 1 + k]; logprobs: float32 [n, 1 + k]; ranks: int32 [n], 1 = most likely.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor


class EngineInfo(Message):
    """What a frontend must know of the engine it attached to."""

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


# ---------------------------------------------------------------- frontend -> core


class Hello(Message, tag="hello"):
    """Attach. The first message on a connection."""

    protocol: int
    version: str
    pid: int
    name: str = ""


class Request(Item):
    """One request.

    key: the sender's own handle, unused by any live request of the sender; answers carry it.
    request_id: the public name, for logs.
    seed: always set (the frontend draws one where the caller gave none); sequence i of n samples with a
        seed derived from (seed, i).
    output_token_ids: per sequence, tokens already generated (a resubmission after the core was lost).
    """

    key: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_id: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    output_token_ids: list[list[int]] | None = None


class Submit(Message, tag="submit"):
    """New requests, in order of arrival."""

    requests: list[Request]


class Abort(Message, tag="abort"):
    """Drop requests (whole, or single sequences of one). Unknown keys are ignored. No delta follows.

    keys: whole requests that nobody waits for any more. sequences: (key, index) pairs that have ended by what
        only the frontend sees: a stop string.
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
    """I live. Answered by `Pong`."""


class Goodbye(Message, tag="goodbye"):
    """Detach: the sender's requests end, nothing more is sent to it."""


# ---------------------------------------------------------------- core -> frontend


class Welcome(Message, tag="welcome"):
    """The answer to `Hello`. `ping_seconds`: how often the frontend should send `Ping`."""

    info: EngineInfo
    version: str
    ping_seconds: float


class Refused(Message, tag="refused"):
    """A message that could not be taken: why. On attaching, the connection is not made."""

    error: str


class RequestTiming(Item):
    """Seconds on the core's monotonic clock."""

    arrived: float
    scheduled: float
    first_token: float
    finished: float


class TokenDelta(Item):
    """What is new for one sequence of one request.

    finish_reason: "stop", "length", "abort" or "error", or None while it runs.
    stop_reason: the stop token, if one of `stop_token_ids` ended it.
    prompt_logprobs: for the next prompt positions (from position 1 on), only with index 0.
    num_cached_tokens, timing: with the first, and the last delta of the sequence.
    error, error_type: why it failed, and the name of the exception if it was refused ("ValueError",
        "EngineBusyError").
    """

    key: int
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    num_cached_tokens: int | None = None
    timing: RequestTiming | None = None
    error: str | None = None
    error_type: str | None = None


class Deltas(Message, tag="deltas"):
    """The outcome of one step for one frontend."""

    deltas: list[TokenDelta]


class CallAnswer(Message, tag="reply"):
    """Answer to a `Call`: a result, or an error with the name of its type."""

    call_id: int
    result: Any = None
    error: str | None = None
    error_type: str | None = None


class Pong(Message, tag="pong"):
    """Answer to `Ping`."""


class CoreDying(Message, tag="dying"):
    """The core's last word: every open request ends with this cause."""

    cause: str


# ---------------------------------------------------------------- core -> worker


class WorkerConfig(Message, tag="load"):
    """Load the model, take the KV memory, answer `Ready`. Sizes in bytes; None: the worker decides."""

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
    """A request takes a slot: all the worker needs to run it from scratch.

    token_ids: prompt and what was generated so far. num_prompt_tokens: how many of them are the prompt.
    block_ids: its KV blocks so far, in order; its first row begins behind what the prefix cache holds.
    seed: of this sequence. stop_ids: tokens that `min_tokens` holds back (EOS and stop tokens).
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: list[int] = []


class Row(Item):
    """One request's part of a step: run tokens [start, start + num_tokens) of its slot.

    new_block_ids: appended to the slot's blocks before the step.
    sample: draw the next token after the last of them, and append it to the slot.
    num_prompt_logprobs: return log probabilities for the first so many of these positions' successors.
    """

    slot: int
    start: int
    num_tokens: int
    new_block_ids: list[int] = []
    sample: bool = False
    num_prompt_logprobs: int = 0


class StepPlan(Message, tag="plan"):
    """One step: free slots, then fill slots, then run the rows as one batch.

    Within each layer every KV write of the batch comes before every read: rows may share blocks that this
    very step fills.

    masked: wait for the step's `Masks` before sampling; they come when the tokens of earlier steps are known.
    """

    step_id: int
    rows: list[Row]
    inits: list[SlotInit] = []
    freed_slots: list[int] = []
    masked: bool = False


class Masks(Message, tag="masks"):
    """What rows under a grammar may sample; sent while the worker runs the step.

    rows: indices into the plan's rows; the others may sample anything.
    bits: int32 [len(rows), ceil(V / 32)]: bit i % 32 of word i // 32 is set if token i may come.
    """

    step_id: int
    rows: list[int]
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
    """A worker process is up and waits for `WorkerConfig`."""

    protocol: int
    pid: int


class Progress(Message, tag="progress"):
    """A phase of the start has ended after so many seconds."""

    phase: str
    seconds: float


class Ready(Message, tag="ready"):
    """The model is loaded and the KV memory taken: what was learned."""

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


class StepResult(Message, tag="result"):
    """The outcome of a step.

    token_ids: one per row with `sample`, in the order of the rows.
    logprobs, prompt_logprobs, errors: by index into the plan's rows; a row with an error has a token id too,
        which means nothing.
    busy_us: time the step took in the worker; idle_us: time the worker waited for it before that.
    """

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, LogprobRows] = {}
    prompt_logprobs: dict[int, LogprobRows] = {}
    errors: dict[int, str] = {}
    busy_us: int = 0
    idle_us: int = 0


class WorkerReply(Message, tag="reply"):
    """Answer to a `WorkerCall`."""

    call_id: int
    result: Any = None
    error: str | None = None
    error_type: str | None = None


class WorkerFailed(Message, tag="failed"):
    """The worker cannot go on and exits: why. `fatal`: starting it again would fail the same way."""

    error: str
    traceback: str = ""
    fatal: bool = False


ToCore: TypeAlias = Hello | Submit | Abort | Call | Ping | Goodbye
ToFrontend: TypeAlias = Welcome | Refused | Deltas | CallAnswer | Pong | CoreDying
ToWorker: TypeAlias = WorkerConfig | StepPlan | Masks | WorkerCall | Shutdown
FromWorker: TypeAlias = WorkerHello | Progress | Ready | StepResult | WorkerReply | WorkerFailed
