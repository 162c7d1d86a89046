"""The messages between frontends and the core.

    frontend --ToCore--> engine core --ToWorker--> worker          (`ipc.worker_messages`)
    frontend <--ToFrontend-- engine core <--FromWorker-- worker

Increase `PROTOCOL` with every change, here or in the parts that messages share, that an older peer could misread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.wire.budget import (
    MAX_ABORTS_PER_MESSAGE,
    MAX_ARGUMENTS,
    MAX_BATCH_BYTES,
    MAX_REQUESTS_PER_MESSAGE,
    MAX_RESUMED_SEQUENCES,
    message_bytes,
    unfinished_bytes,
)
from pagewire.ipc.wire.codec import Buffer, Tensor
from pagewire.ipc.wire.embeddings import EmbeddingsInfo
from pagewire.ipc.wire.items import Item, LogprobRows, Message, Prompt, Task, TokenIds
from pagewire.ipc.wire.lora import AdapterSource, LoRAConfig
from pagewire.ipc.wire.media import MediaInfo
from pagewire.ipc.wire.model_figures import ModelFigures
from pagewire.ipc.wire.params import Name, SamplingParams
from pagewire.ipc.wire.pooling import PoolingInfo
from pagewire.ipc.wire.sources import SourceInfo

PROTOCOL = 12


class EngineInfo(Message):
    """The properties of an engine that frontends need.

    tokenizer: folder or hub repository of its tokenizer. trust_remote_code: the core's setting, which no frontend
        follows: each decides for itself whether the tokenizer's code may run.
    figures: sizes of the model by the headers of its checkpoint; None where the worker could not read any.
    pooling: of a model that pools; None: it generates.
    lora: limits of adapters; None: none are served.
    logits_processors: names of those that requests may ask for.
    embeddings: which ones prompts may bring. short_length, num_states: see `Ready`.
    media: the pictures and sound that prompts may have; None: only text is taken.
    source: what the encoder of an encoder-decoder reads, with which every prompt begins; None: it is another model.
    """

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
    figures: ModelFigures | None = None
    pooling: PoolingInfo | None = None
    lora: LoRAConfig | None = None
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int = 0
    pipeline_parallel_size: int = 1
    embeddings: EmbeddingsInfo = EmbeddingsInfo()
    short_length: int = 0
    num_states: int = 0
    logits_processors: list[str] = []
    media: MediaInfo | None = None
    source: SourceInfo | None = None

    @property
    def takes_tensors(self) -> bool:
        """True if prompts may have more than tokens."""
        own = self.embeddings
        return own.prompts or own.adapters or self.media is not None or self.source is not None

    def max_len_of(self, prompt: Prompt) -> int:
        """The most tokens that a sequence with this prompt may have, those of the prompt included."""
        if self.source is None or not prompt.media:
            return self.max_model_len
        return prompt.media[0].end + self.source.max_target_tokens

    @property
    def by_priority(self) -> bool:
        """True if requests with a lower priority value are scheduled first; otherwise they may have none."""
        return self.scheduling_policy == "priority"

    @property
    def max_message_bytes(self) -> int:
        """The largest first frame of a message to this engine: of a request that has all it may have."""
        return message_bytes(self.max_model_len, self.vocab_size, self.max_n)

    @property
    def max_unfinished_bytes(self) -> int:
        """The memory that the unfinished requests of all frontends may take in the core."""
        return unfinished_bytes(self.max_model_len, self.vocab_size, self.max_n)


# ---------------------------------------------------------------- frontend -> core


class Hello(Message, tag="hello"):
    """Attach: the first message of a frontend."""

    protocol: int
    version: Name
    pid: int
    name: Name = ""


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
    rank: how many sequences of the same batch (such as the prompts of one HTTP request) come before its own; later
        requests of the tenant may pass those with a high rank.
    tenant: the name of whom it is served for; tenants share the engine. Empty: the frontend is the tenant.
    adapter: the LoRA adapter that it runs with; None: the model alone. `prompt.adapter`, its content, is set by the
        core; in a resubmitted request it is that of the first core, which must be the same.
    """

    key: int
    request_id: Name
    prompt: Prompt
    task: Task
    seed: int
    eos_token_id: int | None = None
    priority: int = 0
    output_token_ids: Annotated[list[TokenIds], Meta(max_length=MAX_RESUMED_SEQUENCES)] | None = None
    num_prompt_logprobs: int = 0
    age: float = 0.0
    rank: int = 0
    tenant: str = ""
    adapter: AdapterSource | None = None

    @property
    def params(self) -> SamplingParams:
        """The parameters of a request that generates."""
        assert isinstance(self.task, SamplingParams), "the request is for a pooled result"
        return self.task


class Submit(Message, tag="submit"):
    """New requests, in order of arrival.

    task_of: for each request, the index of the one whose task it has: its own, or an earlier one's (`ipc.tasks`).
        Empty: each has its own.
    """

    requests: Annotated[list[Request], Meta(max_length=MAX_REQUESTS_PER_MESSAGE)]
    task_of: Annotated[list[int], Meta(max_length=MAX_REQUESTS_PER_MESSAGE)] = []


class Outline(Struct):
    """What is read of a message without decoding it: its kind, its requests apart, and the number of a call."""

    type: str = ""
    requests: Annotated[list[Raw], Meta(max_length=MAX_REQUESTS_PER_MESSAGE)] = []
    call_id: Raw = Raw()

    @classmethod
    def of(cls, head: Buffer) -> Outline:
        """The outline of a message, by its first frame; an empty one where decoding would fail anyway.

        It takes a millisecond for a MiB: what is not in the outline is passed over.
        """
        try:
            return msgspec.msgpack.decode(head, type=cls)
        except (ValueError, RecursionError):
            return cls()


def check_batch(head: Buffer) -> None:
    """Check the size of a message's first frame, before it is decoded.

    Raises:
        ProtocolError: it has several requests, and over `MAX_BATCH_BYTES`.
    """
    if len(head) <= MAX_BATCH_BYTES:
        return
    if (num_requests := len(Outline.of(head).requests)) > 1:
        raise ProtocolError(
            f"message of {len(head)} bytes with {num_requests} requests is over the limit of "
            f"{MAX_BATCH_BYTES} for several: send fewer requests in it"
        )


class Abort(Message, tag="abort"):
    """End requests or single sequences. No delta follows; unknown keys are ignored.

    keys: requests to abort. sequences: (key, index) pairs to end with finish reason "stop", because the frontend
        found a stop string.
    """

    keys: Annotated[list[int], Meta(max_length=MAX_ABORTS_PER_MESSAGE)] = []
    sequences: Annotated[list[tuple[int, int]], Meta(max_length=MAX_ABORTS_PER_MESSAGE)] = []


class Call(Message, tag="call"):
    """Ask for one of the core's methods by name; answered by `CallAnswer` with the same `call_id`."""

    call_id: int
    method: Name
    args: Annotated[list[Any], Meta(max_length=MAX_ARGUMENTS)] = []
    kwargs: Annotated[dict[str, Any], Meta(max_length=MAX_ARGUMENTS)] = {}


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
    keys, call_id: the requests and the call of the refused message, as far as they could be read.
    """

    error: str
    error_type: str = "ProtocolError"
    keys: list[int] = []
    call_id: int | None = None


class Detached(Message, tag="detached"):
    """The core has dropped this frontend and its requests, or never knew it; `Hello` attaches it again."""

    cause: str


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
    num_drafts, num_accepted: proposed tokens that were verified for this, and how many of `token_ids` are such.
    adapter: sha256 of the content of its adapter; set with the first token.
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
    num_drafts: int = 0
    num_accepted: int = 0
    adapter: bytes = b""


class Deltas(Message, tag="deltas"):
    """All new output for one frontend.

    keys, token_ids: the first sequence of request `keys[i]` has got the token `token_ids[i]`, and there is nothing
        else to say of it. These tokens come before all of `deltas`.

    Raises:
        ValueError: there are not as many tokens as keys.
    """

    deltas: list[TokenDelta] = []
    keys: list[int] = []
    token_ids: list[int] = []

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens for {len(self.keys)} keys")

    def __iter__(self) -> Iterator[TokenDelta]:
        """All output as deltas, in order."""
        for key, token_id in zip(self.keys, self.token_ids, strict=True):
            yield TokenDelta(key, 0, [token_id])
        yield from self.deltas


class Blocks(Message, tag="blocks"):
    """Which names of KV blocks came and went, for a frontend that has called `follow_blocks`.

    number: 0 for the beginning of a snapshot, then one more with each message. If one is missing, because the
        frontend did not read, it calls `follow_blocks` again.
    reset: all names known before are gone. removed, stored: names (`ipc.block_names`), one behind the other; none
        is in both.
    """

    number: int
    reset: bool = False
    stored: bytes = b""
    removed: bytes = b""


class CallAnswer(Message, tag="reply"):
    """Answer to a `Call`: a result, or an error with the name of its type."""

    call_id: int
    result: Any = None
    error: str | None = None
    error_type: str | None = None


class Pong(Message, tag="pong"):
    """The core's heartbeat, sent to every frontend at regular intervals."""


class CoreDying(Message, tag="dying"):
    """The core is ending; all open requests end with this cause. stopped: on purpose, not by a failure."""

    cause: str
    stopped: bool = False


ToCore: TypeAlias = Hello | Submit | Abort | Call | Ping | Goodbye
ToFrontend: TypeAlias = Welcome | Refused | Detached | Deltas | Blocks | CallAnswer | Pong | CoreDying
