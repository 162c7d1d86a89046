"""The messages between the core and its workers; `ipc.messages` has the protocol version and those of frontends."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from pagewire.ipc.models.own_code import ProcessorSource
from pagewire.ipc.models.registrations import Registrations
from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Item, LogprobRows, Media, Message, Task
from pagewire.ipc.wire.lora import AdapterLoaded, DropAdapter, LoadAdapter, LoRAConfig
from pagewire.ipc.wire.model_figures import ModelFigures
from pagewire.ipc.wire.pooling import PoolerConfig, PoolingInfo
from pagewire.ipc.wire.sources import SourceInfo

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


class Encode(Item):
    """Run the model's encoder on a medium, and keep what it makes under a number.

    entry: the number; what it had before is dropped. kind: "image" or "audio". features: of the model's processor.
    """

    entry: int
    kind: str
    features: dict[str, Tensor]


class SlotInit(Item):
    """Assigns a slot to a sequence, with everything the worker needs to run it.

    token_ids: the prompt and the tokens generated so far. If they are more than `Ready.short_length`, the sequence
        is a long one for as long as it has the slot, else a short one, which must not run more tokens than that.
    num_prompt_tokens: length of the prompt.
    block_ids: its KV blocks, in order. The first row starts after the prefix that is cached in them.
    task: or the index of the init of the same plan that has it (`ipc.tasks`).
    media: those of the prompt, embeddings without their content; of pictures, `data` is their grid int64 [n, 3] of
        time, height and width, or empty. seed: of this sequence.
    stop_ids: EOS and stop tokens, which end the sequence; excluded until `min_tokens` are generated.
    adapter: index of the adapter that it runs with, which is loaded; 0: none.
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    task: Task | int
    seed: int
    stop_ids: list[int] = []
    media: list[Media] = []
    adapter: int = 0


class Row(Item):
    """A sequence's part of a step: run tokens [start, start + num_tokens) of its slot.

    new_block_ids: appended to the slot's blocks before the step.
    drafts: proposed tokens, which are the last len(drafts) of the row's tokens and are not in the slot.
    num_samples: 0, or 1 + len(drafts): sample the token after each of the last `num_samples` tokens. The samples up
        to the first that is no draft are appended to the slot.
    num_prompt_logprobs: return log probabilities of the tokens that follow the first num_prompt_logprobs of these.
    pool: the row's hidden states go into the sequence's pooled result; the row that ends its prompt returns it.
    token_ids: in a pipeline of several stages, tokens that were sampled since the slot's last row. The last stage,
        which has sampled them, has them already; the others append them to the slot before the step.
    num_drafts: propose at most this many tokens to follow the samples that count; only if `num_samples` is not 0.
    media: the embeddings that take the place of some of its tokens.
    state: of a model whose layers keep states: the state slot with those after the token before `start`; -1: there
        is no token before.
    entries: of each medium, apart from embeddings, in whose place some of its tokens lie: where its tokens begin
        and end in the sequence, and the entry with what the encoder has made of it.
    states: where the states go: ends of parts of the row, ascending, each with the state slot for the states after
        the token before that end. The last end is the row's. Nothing else of the plan reads these slots.
    """

    slot: int
    start: int
    num_tokens: int
    new_block_ids: Sequence[int] = ()
    drafts: Sequence[int] = ()
    num_samples: int = 0
    num_prompt_logprobs: int = 0
    pool: bool = False
    token_ids: Sequence[int] = ()
    num_drafts: int = 0
    media: Sequence[Media] = ()
    state: int = -1
    states: Sequence[tuple[int, int]] = ()
    entries: Sequence[tuple[int, int, int]] = ()


class StepPlan(Message, tag="plan"):
    """One step: free slots and entries, assign slots, encode media, then run the rows as one batch.

    In each layer all KV writes of the batch must come before all reads, since rows may share blocks that this same
    step fills.

    masked: wait for the step's `Masks` before sampling; the core sends them when it knows the tokens of earlier
        steps.
    num_steps: if it is more than 1, each row is one token and one sample: run them this many times, each with the
        tokens that the time before has sampled. The next message ends this behind the step that runs, and so does a
        token of a row's `SlotInit.stop_ids`. The rows have the KV blocks for all of it.
    """

    step_id: int
    rows: list[Row]
    inits: list[SlotInit] = []
    freed_slots: list[int] = []
    masked: bool = False
    encodes: list[Encode] = []
    freed_entries: list[int] = []
    num_steps: int = 1


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
    media: it encodes pictures or sound.
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


class RowResult(Item):
    """The result of a row.

    token_ids: 1 to `Row.num_samples` tokens; all but the last are the row's drafts, in order. None without samples.
        Of a plan for several steps: 1 to `StepPlan.num_steps` tokens.
    logprobs: of these tokens. prompt_logprobs: as many as the row says. pooled: if the row ends a prompt to pool.
    error: why the row has no tokens; the other fields are then empty. error_type: name of an exception, or None.
    drafts: up to `Row.num_drafts` tokens that the worker's drafter proposes to follow `token_ids`.
    """

    token_ids: list[int] = []
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    pooled: Tensor | None = None
    error: str | None = None
    error_type: str | None = None
    drafts: list[int] = []

    @property
    def is_token(self) -> bool:
        """True if it is one token and nothing else."""
        return (
            len(self.token_ids) == 1
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.pooled is None
            and self.error is None
            and not self.drafts
        )


NO_TOKEN = -1


class Way(StrEnum):
    """What runs a step in a worker, see `pagewire.workers.run.route`."""

    DECODING = "decoding"
    ENCODING = "encoding"
    RECORDED = "recorded"
    GENERAL = "general"


class StepResult(Message, tag="result"):
    """The result of a step: of each row, or by columns. A stage before the last samples nothing, and has neither.

    rows: one for each of the plan's rows.
    busy_us: duration of the step in the worker, in microseconds. idle_us: time the worker had waited for it.
    token_ids: by columns: the token of each row that has one token and nothing else, `NO_TOKEN` for the other rows.
    others: by columns: the results of these other rows, by index.
    way: what has run it.
    """

    step_id: int
    rows: list[RowResult] = []
    busy_us: int = 0
    idle_us: int = 0
    token_ids: list[int] = []
    others: dict[int, RowResult] = {}
    way: Way = Way.GENERAL

    @property
    def num_rows(self) -> int:
        """The number of rows that it is of."""
        return len(self.rows) or len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all rows."""
        rows = (*self.rows, *self.others.values())
        return len(self.token_ids) - len(self.others) + sum(len(row.token_ids) for row in rows)

    def row(self, index: int) -> RowResult:
        """The result of one row."""
        if self.rows:
            return self.rows[index]
        return self.others.get(index) or RowResult([self.token_ids[index]])

    def by_columns(self) -> StepResult:
        """The same result by columns, which costs its reader little; by rows if none of them is just a token."""
        others = {i: row for i, row in enumerate(self.rows) if not row.is_token}
        if len(others) == len(self.rows):
            return self
        token_ids = [NO_TOKEN if i in others else row.token_ids[0] for i, row in enumerate(self.rows)]
        return StepResult(self.step_id, [], self.busy_us, self.idle_us, token_ids, others, self.way)


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


ToWorker: TypeAlias = WorkerConfig | StepPlan | Masks | WorkerCall | Shutdown | LoadAdapter | DropAdapter
FromWorker: TypeAlias = (
    WorkerHello | Progress | Loading | Ready | StepResult | WorkerReply | WorkerFailed | AdapterLoaded
)
