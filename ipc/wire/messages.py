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
    message_bytes,
    unfinished_bytes,
)
from pagewire.ipc.wire.codec import Buffer
from pagewire.ipc.wire.embeddings import EmbeddingsInfo
from pagewire.ipc.wire.items import Message, Prompt
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.media import MediaInfo
from pagewire.ipc.wire.model_figures import ModelFigures
from pagewire.ipc.wire.params import Name
from pagewire.ipc.wire.pooling import PoolingInfo
from pagewire.ipc.wire.requests import Request as Request
from pagewire.ipc.wire.requests import RequestTiming as RequestTiming
from pagewire.ipc.wire.requests import TokenDelta as TokenDelta
from pagewire.ipc.wire.sources import SourceInfo

PROTOCOL = 14


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


class Submit(Message, tag="submit"):
    """New requests, in order of arrival.

    task_of: for each request, the index of the one whose task it has: its own, or an earlier one's (`ipc.tasks`).
        Empty: each has its own.
    """

    requests: Annotated[list[Request], Meta(max_length=MAX_REQUESTS_PER_MESSAGE)]
    task_of: Annotated[list[int], Meta(max_length=MAX_REQUESTS_PER_MESSAGE)] = []


class Outline(Struct):
    """The parts of a message that are read undecoded: its kind, its requests apart, and the number of a call."""

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
    error_place: the field that the error is about, as its text begins with it (`ipc.errors.FieldError`).
    """

    error: str
    error_type: str = "ProtocolError"
    keys: list[int] = []
    call_id: int | None = None
    error_place: str | None = None


class Detached(Message, tag="detached"):
    """The core has dropped this frontend and its requests, or never knew it; `Hello` attaches it again."""

    cause: str


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
    """Answer to a `Call`: a result, or an error with the name of its type, and the field that it is about."""

    call_id: int
    result: Any = None
    error: str | None = None
    error_type: str | None = None
    error_place: str | None = None


class Pong(Message, tag="pong"):
    """The core's heartbeat, sent to every frontend at regular intervals."""


class CoreDying(Message, tag="dying"):
    """The core is ending; all open requests end with this cause. stopped: on purpose, not by a failure."""

    cause: str
    stopped: bool = False


ToCore: TypeAlias = Hello | Submit | Abort | Call | Ping | Goodbye
ToFrontend: TypeAlias = Welcome | Refused | Detached | Deltas | Blocks | CallAnswer | Pong | CoreDying
