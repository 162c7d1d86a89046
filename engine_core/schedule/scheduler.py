"""The scheduler: decides which tokens run in the next step. Pure: no IO, no clock, no torch.

    add(sequence)   plan() -> StepPlan   commit(StepResult) -> deltas   abort(sequences)   fail() -> deltas

Each plan spends one token budget: running sequences first, in order, then waiting ones while budget, slots and
blocks last. There are no prefill and decode phases: a sequence runs the tokens that it has not computed yet, in
chunks if necessary. Up to `depth` plans may be in flight. The next one is made before the tokens of the last one
are known, so a sequence that ends with a stop token may have one row too many in flight; the token of that row is
dropped. An end by length is known in advance.

When blocks run out, the last running sequence of the most served tenant is preempted: its blocks are freed, and it
is recomputed later. A sequence with a step in flight cannot be preempted. So nothing behind the sequence that lacks
blocks is planned, and one step later the last sequence is idle. A sequence is also preempted if another tenant or
request waits that has no room at all (`TurnQueue`). One that grows longer than its rotary angles are for begins
anew likewise.

A row may carry drafts: proposed tokens, computed and sampled after in the same step. How many of them count is
known when the step returns; until then the sequence is not planned again. Which rows do, and whether a step waits
for the one in flight so that its rows can, `speculation` says.

Which state a sequence is in, and what it holds in it, is changed by `sequence_table` alone.

The grammar mask of a row depends on the token before, which may still be in flight when the row is planned. So
`masks` makes it when the step is the oldest in flight, and it is sent after the plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from typing import Literal

from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.engine_core.schedule.cache_group import CacheGroup
from pagewire.engine_core.schedule.cold import ColdPrefixes
from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.launches import LaunchLength
from pagewire.engine_core.schedule.micro_batches import micro_batch
from pagewire.engine_core.schedule.retained import RetainedPrefixes
from pagewire.engine_core.schedule.row_results import (
    add_facts,
    error_delta,
    error_of,
    forget_blocks,
    pooled_delta,
    spoiled_by,
)
from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.schedule.sequence_table import HANDOVER_SECONDS, SequenceTable
from pagewire.engine_core.schedule.speculation import NoSpeculation, Speculation
from pagewire.engine_core.schedule.step import (
    Outcome,
    PlannedStep,
    SchedulerStats,
    StepOutcomes,
    add_prompt,
    slot_init,
)
from pagewire.engine_core.schedule.step_time import StepLimit
from pagewire.engine_core.schedule.stopping import append
from pagewire.engine_core.schedule.turns import TurnQueue
from pagewire.ipc.suspicion import NO_SUSPICION
from pagewire.ipc.wire.requests import TokenDelta
from pagewire.ipc.wire.steps import Masks, Row, RowResult, StepPlan, StepResult


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a scheduler.

    depth: maximum number of steps in flight. stages: of the pipeline of workers (`micro_batches`).
    launch_steps: maximum number of steps that one plan is for (`launches`).
    watermark: fraction of the blocks that must stay free when a sequence is admitted, for running ones to grow.
    step_seconds: that a step with prompts may take while a sequence waits for a token (`step_time`); 0: any.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: Literal["fcfs", "priority"] = "fcfs"
    depth: int = 2
    watermark: float = 0.01
    stages: int = 1
    launch_steps: int = 1
    step_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"{self.num_blocks} KV blocks of {self.block_size} tokens do not hold one request of "
                f"max_model_len={self.max_model_len}; give more KV memory, or lower max_model_len to "
                f"{self.num_blocks * self.block_size}"
            )


class Scheduler:
    """Plans steps over the unfinished sequences, and commits their results.

    waiting: an empty queue, which says whose turn it is. speculation: says which rows carry drafts.
    cold, retained: prefixes in a cold tier, and promised ones.
    groups: the caches beside the token blocks.

    Attributes:
        sequences: all that are unfinished. running, waiting, kv: those of `sequences`.
        in_flight: the steps whose results have not come, oldest first. limit: of the time of steps.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: TurnQueue,
        speculation: Speculation | None = None,
        cold: ColdPrefixes | None = None,
        groups: Iterable[CacheGroup] = (),
        retained: RetainedPrefixes | None = None,
    ) -> None:
        self.config = config
        self.speculation = speculation or NoSpeculation()
        self.stats = SchedulerStats()
        self.kv = KVCache(config.num_blocks, config.block_size, groups)
        self._launches = LaunchLength(config.launch_steps)
        self.limit = StepLimit(config.step_seconds, config.block_size)
        self.sequences = SequenceTable(
            self.kv, config.max_num_seqs, waiting, self.speculation, self.stats, cold, retained
        )
        self.running, self.waiting = self.sequences.running, waiting
        self.in_flight: deque[PlannedStep] = deque()
        self._next_step_id = 0
        self._watermark = int(config.watermark * config.num_blocks)
        self._has_plain_rows = not (self.speculation.drafts or self.kv.groups or config.stages > 1)

    # ------------------------------------------------------------ events

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting sequences."""
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.sequences.wait(sequence)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End sequences without a delta; their tokens in flight are dropped on return."""
        for sequence in sequences:
            if not sequence.finished:
                self.sequences.finish(sequence)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can or should run now (a commit may change that).

        Raises:
            RuntimeError: `depth` steps are already in flight.
        """
        if len(self.in_flight) >= self.config.depth:
            raise RuntimeError(f"{len(self.in_flight)} steps are in flight")
        if self.in_flight and self.speculation.waits(self.in_flight[-1], self.running, len(self.waiting)):
            return None
        if self.sequences.trial_is_due and not self.preempt_all():
            return None
        step = PlannedStep(self._next_step_id, self.config.max_num_batched_tokens)
        step.late = not self.in_flight and self.config.depth > 1
        self.sequences.begin(now, self.limit.applies(self.running))
        newcomer, leaving = self.sequences.hand_over(now)
        # Until `leaving` is preempted none is admitted: it would take blocks that are about to change hands.
        if self._plan_running(step, leaving) and leaving is None:
            self._plan_waiting(step, newcomer, now)
        if not step.rows:
            return None
        step.encode(self.kv, self.limit, self.running)
        if self.config.launch_steps > 1 and not self.waiting:
            self._launches.prolong(step, self.running, self.kv)
        self._next_step_id += 1
        self.stats.num_prompt_tokens += step.num_prompt_tokens
        self.in_flight.append(step)
        return step.plan(self.sequences.take_freed_slots(), self.kv)

    def masks(self, now: float) -> tuple[Masks | None, list[Outcome]]:
        """Grammar masks for the oldest step in flight; None if no row of it has a grammar. Call once per step.

        A sequence whose grammar allows no next token ends with an error: its row gets no mask, and its token is
        dropped.
        """
        if not self.in_flight or not self.in_flight[0].masked:
            return None, []
        masks, failures = self.in_flight[0].masks()
        return masks, [
            self._end_with_error(sequence, str(why), "ValueError", now) for sequence, why in failures
        ]

    def commit(self, result: StepResult, now: float) -> StepOutcomes:
        """Append the tokens of the oldest step in flight; returns what the sequences got.

        Raises:
            ValueError: `result` is that of another step, or does not fit the step's rows.
        """
        if not self.in_flight or self.in_flight[0].step_id != result.step_id:
            raise ValueError(f"the result of step {result.step_id} is not that of the oldest step in flight")
        step = self.in_flight[0]
        step.check(result)
        self.in_flight.popleft()
        self.sequences.tick(now)
        outcomes, rows = step.append_plain(result, now)
        self.stats.num_output_tokens += len(outcomes.sequences)
        for sequence, row, row_result in rows:
            sequence.land(row.num_samples * step.num_steps)
            if sequence.state is not State.FINISHED:
                if step.num_steps > 1:
                    self.kv.verify(sequence, row, step.num_steps - max(1, len(row_result.token_ids)))
                if row_result.error is not None:
                    ended, blocks = spoiled_by(sequence, row, row_result, self.kv.block_size, self.running)
                    ends = (self._end_with_error(one, *error_of(one, row_result), now) for one in ended)
                    outcomes.others.extend(ends)
                    forget_blocks(self.kv, blocks)
                elif (delta := self._commit_row(sequence, row, row_result, now)) is not None:
                    outcomes.others.append((sequence, delta))
        self.stats.num_steps += step.num_run(result)
        self.limit.measure(step.chunks, step.num_decoded, step.seconds(result), result.encode_us / 1e6)
        self._launches.measure(step, result)
        self.speculation.measure(step, result, goes_on=bool(self.running))
        return outcomes

    def fail(self, now: float) -> list[Outcome]:
        """Queue running sequences again, for all KV is lost with the worker; returns the ends of `guilty` ones."""
        for sequence in {sequence for step in self.in_flight for sequence in step.owners}:
            sequence.crash()
        self.in_flight.clear()
        outcomes = []
        for sequence in list(self.running):
            if sequence.guilty:
                text = f"the worker crashed {sequence.suspicion.num_in_all} times while it ran this request"
                outcomes.append(self._end_with_error(sequence, text, None, now))
            else:
                self.sequences.requeue(sequence)
        self.sequences.lose_prefixes()
        self.sequences.take_freed_slots()  # new workers have no slots to free
        return outcomes

    def preempt_all(self) -> bool:
        """Preempt every running sequence. Returns False, and does nothing, while steps are in flight."""
        if self.in_flight:
            return False
        for sequence in list(self.running):
            self.sequences.preempt(sequence)
        return True

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and does nothing, while sequences are running."""
        if self.running:
            return False
        self.sequences.forget_prefixes()
        return True

    # ------------------------------------------------------------ planning

    def _plan_running(self, step: PlannedStep, leaving: Sequence | None) -> bool:
        """Plan running sequences but `leaving`. False if blocks ran out, so that no waiting one may be admitted."""
        num_preemptions = self.stats.num_preemptions
        batch = micro_batch(self.running, self.config.stages, self.config.depth, len(self.in_flight))
        num_others = self.num_unfinished - len(batch)
        chosen = self.speculation.choose(batch, num_others, step.budget, ahead=bool(self.in_flight))
        for sequence in batch:
            if step.budget == 0:
                break
            if sequence.computed < sequence.plain_end and sequence is not leaving:
                step.add_plain(sequence)
                continue
            count = self.limit.room(step.chunks, sequence, step.budget, self.running)
            if count == 0 or sequence.state is not State.RUNNING or sequence is leaving:
                continue
            if sequence.computed < sequence.num_prompt_tokens:
                count = sequence.chunk(count)
                if count == 0:  # a medium is larger than what is left of the budget, and nothing may pass it
                    return False
                count = self.kv.chunk(sequence, count)
                if count == 0:  # a medium comes, which is not encoded yet
                    step.awaits_encoder(sequence, self.kv)
                    continue
            end = sequence.computed + count
            if end > sequence.room and not self.sequences.make_room(sequence, self.kv.missing(sequence, end)):
                if sequence.slot >= 0:
                    return False
                continue  # it was preempted itself, as one of the most served tenant
            drafts = self._fitting(chosen[sequence], sequence, count, step) if sequence in chosen else ()
            self._schedule(step, sequence, count, drafts)
        if num_preemptions == self.stats.num_preemptions:
            return True
        if not step.rows:  # all of a micro-batch were preempted, and left their room to the others
            self._plan_running(step, leaving)
        return False

    def _plan_waiting(self, step: PlannedStep, newcomer: Sequence | None, now: float) -> None:
        """Admit waiting sequences while there is room; `newcomer` may also use the watermark blocks."""
        if self.running and self.running[0].suspect:
            return  # it runs alone
        if suspects := self.waiting.suspects:
            self._admit(step, suspects[0], 0, now)
            return
        if newcomer is not None:
            if step.is_open and self.sequences.num_free_slots and self._admit(step, newcomer, 0, now):
                self.sequences.next_handover = now + HANDOVER_SECONDS
            return
        while step.is_open and self.sequences.num_free_slots:
            watermark = self._watermark if self.running else 0
            sequence = self.sequences.next(watermark)
            if sequence is None or not self._admit(step, sequence, watermark, now):
                break

    def _admit(self, step: PlannedStep, sequence: Sequence, watermark: int, now: float) -> bool:
        """Give a waiting sequence blocks and a slot, and plan its first chunk; False if it does not fit."""
        if not self.kv.admit(sequence, watermark):
            return False
        room = sequence.chunk(self.limit.room(step.chunks, sequence, step.budget, self.running))
        count = self.kv.chunk(sequence, room)
        if count == 0 and not (room and step.rows and step.awaits_encoder(sequence, self.kv)):
            self.kv.free(sequence)  # no time is left, or this step can neither run nor encode a medium
            return False
        self.sequences.start(sequence, now)
        step.inits.append(slot_init(sequence))
        if count:
            self._schedule(step, sequence, count, ())
        return True

    def _fitting(self, drafts: list[int], sequence: Sequence, count: int, step: PlannedStep) -> list[int]:
        """The first of the drafts that follow the next `count` tokens: those for which there are budget and room.

        Free blocks that other rows may need are left to them.
        """
        end = sequence.computed + count
        missing = self.kv.missing(sequence, end)
        num_places = min(self.kv.num_places(sequence, missing, len(self.running)), sequence.angles_end)
        return drafts[: max(0, min(step.budget - count, num_places - end))]

    def _schedule(self, step: PlannedStep, sequence: Sequence, count: int, drafts: Sequence_[int]) -> None:
        """Add the next `count` tokens of a sequence and its drafts to a step."""
        start, end = sequence.computed, sequence.computed + count
        num_tokens = count + len(drafts)
        samples = not sequence.pools and end == len(sequence.token_ids) + sequence.num_pending
        num_samples = 1 + len(drafts) if samples else 0
        row = Row(sequence.slot, start, num_tokens, (), drafts, num_samples, 0, sequence.pools)
        if self.config.stages > 1:
            row.token_ids = sequence.send_tokens(sequence.num_sent)
        if num_samples:
            row.num_drafts = self.speculation.num_asked(sequence)
        if start < sequence.num_prompt_tokens:
            add_prompt(row, sequence, end)
        sequence.launch(num_tokens, num_samples)
        self.kv.fill(sequence, row)
        step.add(sequence, row)
        if self._has_plain_rows and num_samples == 1:
            sequence.begin_plain(self.kv.block_size)

    # ------------------------------------------------------------ committing

    def _commit_row(self, sequence: Sequence, row: Row, result: RowResult, now: float) -> TokenDelta | None:
        if result.prompt_logprobs is not None:
            sequence.num_prompt_logprobs = row.start + row.num_prompt_logprobs
        if result.pooled is not None:
            self.sequences.finish(sequence)
            return pooled_delta(sequence, result.pooled, now)
        if not result.token_ids:
            if result.prompt_logprobs is None:
                return None
            return TokenDelta(sequence.key, sequence.index, [], prompt_logprobs=result.prompt_logprobs)
        if row.drafts:
            self.kv.verify(sequence, row, row.num_samples - len(result.token_ids))
        first = sequence.first_token_time == 0.0
        try:
            num_tokens, reason, stop_token = append(sequence, result.token_ids, now)
        except GrammarError as error:
            return self._end_with_error(sequence, str(error), "ValueError", now)[1]
        if sequence.suspicion is not NO_SUSPICION:
            sequence.survive(alone=len(self.running) == 1)
        self.stats.num_output_tokens += num_tokens
        sequence.tenant.num_output_tokens += num_tokens
        num_accepted = self.speculation.take(sequence, row, result, num_tokens)
        if reason is not None:
            self.sequences.finish(sequence)
        elif len(sequence.token_ids) > sequence.angles_end:  # it began no step with the last of these tokens
            self.sequences.requeue(sequence)
        elif first:
            self.sequences.retain(sequence)
        delta = TokenDelta(sequence.key, sequence.index, result.token_ids[:num_tokens], reason, stop_token)
        if result.logprobs is not None:
            delta.logprobs = result.logprobs.first(num_tokens)
        delta.prompt_logprobs = result.prompt_logprobs
        if first or reason is not None or sequence.num_versions_told < len(sequence.versions):
            add_facts(delta, sequence, now)
        if row.drafts:
            delta.num_drafts, delta.num_accepted = len(row.drafts), num_accepted
        return delta

    def _end_with_error(self, sequence: Sequence, text: str, error_type: str | None, now: float) -> Outcome:
        self.sequences.finish(sequence)
        return sequence, error_delta(sequence, text, now, error_type)
