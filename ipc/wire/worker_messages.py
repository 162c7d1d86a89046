"""The messages between the core and its workers; `ipc.messages` has the protocol version and those of frontends."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from pagewire.ipc.models.own_code import ProcessorSource
from pagewire.ipc.models.registrations import Registrations
from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.items import Message, WeightFile
from pagewire.ipc.wire.lora import AdapterLoaded, DropAdapter, LoadAdapter, LoRAConfig
from pagewire.ipc.wire.model_figures import ModelFigures
from pagewire.ipc.wire.pooling import PoolerConfig, PoolingInfo
from pagewire.ipc.wire.sources import SourceInfo
from pagewire.ipc.wire.steps import NO_TOKEN as NO_TOKEN
from pagewire.ipc.wire.steps import Encode as Encode
from pagewire.ipc.wire.steps import Masks as Masks
from pagewire.ipc.wire.steps import Row as Row
from pagewire.ipc.wire.steps import RowResult as RowResult
from pagewire.ipc.wire.steps import SlotInit as SlotInit
from pagewire.ipc.wire.steps import StepPlan as StepPlan
from pagewire.ipc.wire.steps import StepResult as StepResult
from pagewire.ipc.wire.steps import Way as Way
from pagewire.ipc.wire.tier_messages import ForgetBlocks, MoveBlocks, TierConfig, TierReport

# ---------------------------------------------------------------- core -> worker


class Parallel(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """A worker's place in its group, and how it meets the other ranks.

    local_rank, local_size: its place among the ranks of its machine, and their number.
    rendezvous: the name under which the ranks meet: 128 random bits for each start of a group, so that what is left
        of an earlier one cannot meet the next. Empty in a group of one.
    host, port: where rank 0 listens for the others; an empty host: all ranks are on one machine.
    shared_memory: ranks on CPUs of one machine exchange tensors through shared memory.
    max_loading: ranks of a machine that load weights at the same time; 0: all.
    turn, num_turns: the ranks of a group load weights in this many turns, and this one in its turn, from 0.
    stages: the group is a pipeline of this many stages; each has `num_shards` neighbouring ranks, which divide its
        layers.
    layers: the number of layers of each stage; empty: as even as possible.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    rendezvous: str = ""
    host: str = ""
    port: int = 0
    shared_memory: bool = True
    max_loading: int = 0
    turn: int = 0
    num_turns: int = 1
    stages: int = 1
    layers: tuple[int, ...] = ()

    @property
    def num_shards(self) -> int:
        """Ranks that divide a layer."""
        return self.size // self.stages

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.rank // self.num_shards


class WorkerConfig(Message, tag="load"):
    """Load the model and allocate the KV cache; answered by `Ready`. None: the worker decides.

    parallel: the core sets it for each rank at each start of a group.
    weight_cache: take packed weights from the cache, and keep them there.
    kv_scales: of each layer's keys and values in a KV cache of 8-bit floats; empty: the checkpoint's, or 1.
    runner, convert, pooler_config: see `EngineArgs`.
    speculative: where drafts come from, and how many a row has at most; None: there are none.
    lora: None: adapters are not served. merged_adapter: folder of an adapter that is added to the weights as they
        are read; empty: none.
    registrations: models of one's own, and the plugins that the worker loads.
    logits_processors, worker_extension: code of one's own; see `ipc.models.own_code`.
    media: load what encodes pictures or sound. allowed_save_path, batch_invariant: see `EngineArgs`.
    tier: where KV blocks are kept beside the KV memory; None: nowhere.
    weights: files whose tensors take the place of the checkpoint's, the last file's first.
    """

    model_path: str
    dtype: str = "auto"
    device: str = "cpu"
    load_format: str = "auto"
    allowed_save_path: str = ""
    trust_remote_code: bool = False
    hf_overrides: dict[str, Any] = {}
    max_model_len: int | None = None
    disable_sliding_window: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    num_threads: int | None = None
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    weight_cache: bool = False
    kv_scales: list[float] = []
    parallel: Parallel = Parallel()
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: PoolerConfig | None = None
    speculative: SpeculativeConfig | None = None
    lora: LoRAConfig | None = None
    merged_adapter: str = ""
    registrations: Registrations = Registrations()
    logits_processors: tuple[ProcessorSource, ...] = ()
    worker_extension: str = ""
    media: bool = False
    batch_invariant: bool = False
    tier: TierConfig | None = None
    weights: list[WeightFile] = []


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
    """A worker process has started and waits for `WorkerConfig`.

    machine: equal in workers that can exchange memory: same boot, network namespace and user.
    host, port: where it listens for other ranks; no host if it was started for the core's machine only.
    """

    protocol: int
    pid: int
    machine: str = ""
    host: str = ""
    port: int = 0


class Progress(Message, tag="progress"):
    """A phase of the worker's start has ended; it took `seconds`."""

    phase: str
    seconds: float


class Loading(Message, tag="loading"):
    """A start, or a call that shows progress, goes on: since its last message the worker has used the processor,
    or read or written bytes.
    """


class Ready(Message, tag="ready"):
    """The model is loaded and the KV cache allocated; the fields describe them.

    figures: what the worker expected by the headers of the checkpoint; None where it could not read any.
    pooling: of a model that pools; None: it generates.
    embedding_size: numbers in the embedding of a token; 0: no other embeddings can take its place.
    short_length: the most tokens of a sequence whose rotary angles are those of short ones; 0: all are alike.
    num_states: state slots; 0: its layers keep no states. Running sequences own at most half of them, so
        there are at least 2. bytes_per_state: of one, over all layers.
    source: what the encoder of an encoder-decoder reads; None: it is another model.
    media: it encodes pictures or sound. encoder_layers: those between which a pass of its encoder can stop; 0: a
        pass runs in one piece.
    tier: what is in the cold tier; empty without one.
    num_swap_blocks, num_swap_states: places in the swap space; 0: there is none.
    """

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
    figures: ModelFigures | None = None
    pooling: PoolingInfo | None = None
    embedding_size: int = 0
    short_length: int = 0
    num_states: int = 0
    bytes_per_state: int = 0
    source: SourceInfo | None = None
    media: bool = False
    encoder_layers: int = 0
    tier: list[TierReport] = []
    num_swap_blocks: int = 0
    num_swap_states: int = 0


class WorkerReply(Message, tag="reply"):
    """Answer to a `WorkerCall`."""

    call_id: int
    result: Any = None
    error: str | None = None
    error_type: str | None = None


class WorkerFailed(Message, tag="failed"):
    """The worker exits because of `error`. fatal: starting it again would fail the same way.

    error_type: name of the exception (`ipc.errors.ERROR_TYPES`).
    lacks_memory: the model does not fit into the memory that is available now; a worker that is started again after
        another one may find more.
    """

    error: str
    traceback: str = ""
    fatal: bool = False
    error_type: str = "RuntimeError"
    lacks_memory: bool = False


ToWorker: TypeAlias = (
    WorkerConfig
    | StepPlan
    | Masks
    | WorkerCall
    | Shutdown
    | LoadAdapter
    | DropAdapter
    | MoveBlocks
    | ForgetBlocks
)
FromWorker: TypeAlias = (
    WorkerHello
    | Progress
    | Loading
    | Ready
    | StepResult
    | WorkerReply
    | WorkerFailed
    | AdapterLoaded
    | TierReport
)
