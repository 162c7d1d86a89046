"""A step as the scheduler keeps it while it is planned and in flight, and what it counts of steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import TypeAlias

from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.schedule.step_time import ChunkWork, StepLimit
from pagewire.engine_core.schedule.stopping import append_plain, stop_ids
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.requests import TokenDelta
from pagewire.ipc.wire.steps import NO_TOKEN, Masks, Row, RowResult, SlotInit, StepPlan, StepResult


@dataclass(slots=True)
class PlannedStep:
    """A step that is being planned or in flight; `sequences[i]` is the sequence of `rows[i]`.

    budget: tokens that may still be added. num_prompt_tokens: prompt tokens among those of the rows.
    masked: some row samples under a grammar. late: it is planned with no other in flight, although that is allowed.
    num_drafts: tokens of its rows that are drafts. num_asked: drafts that its worker is asked for.
    num_steps: that its plan is for; it is the first of them.
    special: indices of rows that do not sample just one token. chunks: rows of prompts, and of what is recomputed.
    encoding: the running sequence without a row for which a slice of a medium is encoded; None: there is none.
    """

    step_id: int
    budget: int
    sequences: list[Sequence] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    inits: list[SlotInit] = field(default_factory=list)
    num_prompt_tokens: int = 0
    masked: bool = False
    late: bool = False
    num_drafts: int = 0
    num_asked: int = 0
    num_steps: int = 1
    special: list[int] = field(default_factory=list)
    chunks: ChunkWork = field(default_factory=ChunkWork)
    encoding: Sequence | None = None

    @property
    def num_decoded(self) -> int:
        """Tokens of its rows that are no chunks, with their drafts."""
        return len(self.rows) - self.chunks.num_rows + self.num_drafts

    @property
    def owners(self) -> Iterator[Sequence]:
        """The sequences for which it does something."""
        yield from self.sequences
        if self.encoding is not None:
            yield self.encoding

    @property
    def is_open(self) -> bool:
        """True if rows of more sequences may be added."""
        return self.budget > 0 and not self.chunks.is_full

    def add_plain(self, sequence: Sequence) -> None:
        """Launch the next row of a sequence within its `plain_end`, and add it."""
        start = sequence.computed
        sequence.computed = start + 1
        sequence.num_pending += 1
        sequence.num_in_flight += 1
        self.sequences.append(sequence)
        self.rows.append(Row(sequence.slot, start, 1, (), (), 1))
        self.budget -= 1

    def add(self, sequence: Sequence, row: Row) -> None:
        """Add a row of a sequence."""
        if row.num_samples != 1:
            self.special.append(len(self.rows))
        self.sequences.append(sequence)
        self.rows.append(row)
        self.budget -= row.num_tokens
        if row.drafts or row.num_drafts:
            self.num_drafts += len(row.drafts)
            self.num_asked += row.num_drafts
        num_known = row.num_tokens - len(row.drafts)
        if num_known > 1 or row.start < sequence.num_prompt_tokens:
            self.chunks.add(row.start, num_known)
        if row.start < sequence.num_prompt_tokens:
            self.num_prompt_tokens += min(row.num_tokens, sequence.num_prompt_tokens - row.start)
        if sequence.matcher is not None and row.num_samples:
            self.masked = True

    def awaits_encoder(self, sequence: Sequence, kv: KVCache) -> bool:
        """True if a sequence has no row because it comes to a medium of which this step encodes a slice.

        It is the first such sequence. The slice gets the time that the rows leave: no prompt behind it runs.
        """
        if self.encoding is not None or not any(group.pending(sequence) for group in kv.groups):
            return False
        self.encoding, self.chunks.is_full = sequence, True
        return True

    def encode(self, kv: KVCache, limit: StepLimit, running: Collection[Sequence]) -> None:
        """Encode a slice for the sequence that awaits it, once all rows are planned. running: all that run."""
        sequence, self.encoding = self.encoding, None
        if sequence is None or sequence.state is not State.RUNNING:  # another row may have taken its blocks
            return
        for group in kv.groups:
            pending = group.pending(sequence)  # another row may have taken its room there
            if pending is not None and (count := limit.layers(self.chunks, *pending, running)):
                group.advance(sequence, count)
                self.encoding = sequence

    def masks(self) -> tuple[Masks, list[tuple[Sequence, GrammarError]]]:
        """The grammar masks of its rows, and the sequences whose grammar allows no next token: these have none."""
        samples: list[int] = []
        bits: list[bytes] = []
        failures: list[tuple[Sequence, GrammarError]] = []
        num_samples = 0
        for sequence, row in zip(self.sequences, self.rows, strict=True):
            first, num_samples = num_samples, num_samples + row.num_samples
            if not row.num_samples or sequence.matcher is None or sequence.finished:
                continue
            try:
                masks = sequence.matcher.masks(row.drafts)
            except GrammarError as error:
                failures.append((sequence, error))
            else:
                bits += masks
                samples += range(first, first + len(masks))
        width = len(bits[0]) // 4 if bits else 0
        return Masks(self.step_id, samples, Tensor("int32", (len(bits), width), b"".join(bits))), failures

    def plan(self, freed_slots: list[int], kv: KVCache) -> StepPlan:
        """What the workers get, at the end of a plan. freed_slots: of sequences that have ended."""
        plan = StepPlan(
            self.step_id, self.rows, self.inits, freed_slots, self.masked, num_steps=self.num_steps
        )
        kv.settle(plan)
        return plan

    def num_run(self, result: StepResult) -> int:
        """The number of steps that its result is of: as many as the plan is for, or fewer."""
        if self.num_steps == 1:
            return 1
        rows = result.rows or result.others.values()
        return max([1, *(len(row.token_ids) for row in rows)])  # a row may end with no token

    def seconds(self, result: StepResult) -> float:
        """What it took in the worker, or each of its steps, if it is several; 0: it is not known."""
        return result.busy_us / 1e6 / self.num_run(result)

    def check(self, result: StepResult) -> None:
        """Check that a worker's result fits the rows.

        Raises:
            ValueError: it does not.
        """
        check_columns(result)
        if result.num_rows != len(self.rows):
            raise ValueError(f"step {self.step_id} of {len(self.rows)} rows returned {result.num_rows}")
        everywhere = result.rows or self.num_steps > 1
        for i in range(len(self.rows)) if everywhere else {*self.special, *result.others}:
            if self.num_steps > 1:
                check_launch(result.row(i), self.num_steps)
            else:
                row = self.rows[i]
                ends_prompt = row.start + row.num_tokens == self.sequences[i].num_prompt_tokens
                check_result(row, result.row(i), ends_prompt)

    def append_plain(
        self, result: StepResult, now: float
    ) -> tuple[StepOutcomes, list[tuple[Sequence, Row, RowResult]]]:
        """Append the tokens of sequences to which nothing else happens.

        result: it was checked. Returns these sequences with their tokens, and all other rows with their results.
        """
        sequences, token_ids = self.sequences, result.token_ids
        others: Sequence_[int] = range(len(self.rows))
        if token_ids:
            others = append_plain(sequences, token_ids, now)
        if others:
            left = set(others)
            sequences = [sequence for i, sequence in enumerate(self.sequences) if i not in left]
            token_ids = [token_id for i, token_id in enumerate(token_ids) if i not in left]
        rows = [(self.sequences[i], self.rows[i], result.row(i)) for i in others]
        return StepOutcomes(sequences, token_ids), rows


Outcome: TypeAlias = tuple[Sequence, TokenDelta]


@dataclass(slots=True)
class StepOutcomes:
    """What a step has given to its sequences.

    sequences, token_ids: those that got one token, about which there is nothing else to say. others: the rest.
    """

    sequences: Sequence_[Sequence] = ()
    token_ids: Sequence_[int] = ()
    others: list[Outcome] = field(default_factory=list)

    def __iter__(self) -> Iterator[Outcome]:
        """All of them as deltas."""
        for sequence, token_id in zip(self.sequences, self.token_ids, strict=True):
            yield sequence, TokenDelta(sequence.key, sequence.index, [token_id])
        yield from self.others


@dataclass
class SchedulerStats:
    """Counts since the core started.

    num_cache_preemptions: preemptions because the KV cache was full.
    num_resumed: sequences that started, or started again, behind a cached prefix.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_cache_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_resumed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


def check_columns(result: StepResult) -> None:
    """Check that a result is of each row or by columns, and that these agree.

    Raises:
        ValueError: it is not.
    """
    token_ids = result.token_ids
    if result.rows and (token_ids or result.others):
        raise ValueError("a result is of each row, or by columns, but not both")
    if len(result.others) != token_ids.count(NO_TOKEN) or any(
        not 0 <= i < len(token_ids) or token_ids[i] != NO_TOKEN for i in result.others
    ):
        raise ValueError("the columns of a result disagree about which rows have one token")


def check_result(row: Row, result: RowResult, ends_prompt: bool) -> None:
    """Check that a worker's result fits its row. ends_prompt: the row's tokens are the last of a prompt.

    Raises:
        ValueError: it does not.
    """
    if result.error is not None:
        return
    num_tokens = len(result.token_ids)
    if len(result.drafts) > row.num_drafts:
        raise ValueError(
            f"a row returned {len(result.drafts)} drafts, at most {row.num_drafts} were asked for"
        )
    if num_tokens > row.num_samples or (row.num_samples and not num_tokens):
        raise ValueError(f"a row of {row.num_samples} samples returned {num_tokens} tokens")
    if result.token_ids[:-1] != list(row.drafts[: max(0, num_tokens - 1)]):
        raise ValueError(f"a row returned {result.token_ids}, but its drafts are {row.drafts}")
    if (result.pooled is not None) != (row.pool and ends_prompt):
        raise ValueError("a row returned a pooled result without need, or none where there must be one")


def check_launch(result: RowResult, num_steps: int) -> None:
    """Check that a worker's result fits a row of a plan for several steps.

    Raises:
        ValueError: it does not.
    """
    if result.error is None and not 0 < len(result.token_ids) <= num_steps:
        raise ValueError(f"a row of {num_steps} steps returned {len(result.token_ids)} tokens")
    if result.drafts or result.pooled is not None:
        raise ValueError("a row of several steps returned what none of them was asked for")


def slot_init(sequence: Sequence) -> SlotInit:
    """The state that the workers give the slot of a sequence which starts, or starts again."""
    return SlotInit(
        slot=sequence.slot,
        token_ids=sequence.send_tokens(0),
        num_prompt_tokens=sequence.num_prompt_tokens,
        block_ids=[block.block_id for block in sequence.blocks],
        task=sequence.request.task,
        seed=sequence.seed,
        stop_ids=[] if sequence.pools else stop_ids(sequence),
        media=sequence.request.prompt.places(features.grid for features in sequence.features),
        adapter=0 if sequence.adapter is None else sequence.adapter.index,
    )


def add_prompt(row: Row, sequence: Sequence, end: int) -> None:
    """Add to a row of tokens up to `end` what its sequence's prompt has for it: embeddings, log probabilities."""
    row.media = sequence.request.prompt.embeddings(row.start, end)
    if sequence.returns_prompt_logprobs and row.start >= sequence.num_prompt_logprobs:
        row.num_prompt_logprobs = max(0, min(end, sequence.num_prompt_tokens - 1) - row.start)
