"""A step: what the workers are to run, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Item, LogprobRows, Media, Message, Task

NO_TOKEN = -1


class Encode(Item):
    """Run the model's encoder on a medium, and keep what it makes under a number. Its pass may stop between layers.

    entry: the number; what it had before is dropped. kind: "image" or "audio". features: of the model's processor;
        empty: the pass that stopped goes on.
    until: number of layers after which the pass stops, until a later plan has it go on; 0: it runs to its end.
        Rows take the entry once the pass is at its end.
    """

    entry: int
    kind: str
    features: dict[str, Tensor]
    until: int = 0


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


class RowResult(Item):
    """The result of a row.

    token_ids: 1 to `Row.num_samples` tokens; all but the last are the row's drafts, in order. None without samples.
        Of a plan for several steps: 1 to `StepPlan.num_steps` tokens.
    logprobs: of these tokens. prompt_logprobs: as many as the row says. pooled: if the row ends a prompt to pool.
    error: why the row has no tokens; the other fields are then empty. error_type: name of an exception, or None.
    drafts: up to `Row.num_drafts` tokens that the worker's drafter proposes to follow `token_ids`.
    is_spoiled: a medium of the row could not be encoded, so the keys and values that it has written are wrong.
    """

    token_ids: list[int] = []
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    pooled: Tensor | None = None
    error: str | None = None
    error_type: str | None = None
    drafts: list[int] = []
    is_spoiled: bool = False

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


class Way(str, Enum):
    """The way in which a worker runs a step, see `pagewire.workers.run.route`."""

    DECODING = "decoding"
    ENCODING = "encoding"
    RECORDED = "recorded"
    GENERAL = "general"


class StepResult(Message, tag="result"):
    """The result of a step: of each row, or by columns. A stage before the last samples nothing, and has neither.

    rows: one for each of the plan's rows.
    busy_us: duration of the step in the worker, in microseconds, without the encoder's passes.
    idle_us: time the worker had waited for it. encode_us: duration of the encoder's passes, which come first.
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
    encode_us: int = 0

    @property
    def worker_us(self) -> int:
        """Duration of the step in the worker with the encoder's passes, in microseconds."""
        return self.busy_us + self.encode_us

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
        times = self.busy_us, self.idle_us
        return StepResult(self.step_id, [], *times, token_ids, others, self.way, self.encode_us)
