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
request waits that has no room at all (`fairness`). One that grows longer than its rotary angles are for begins anew
likewise.

A row may carry drafts: proposed tokens, computed and sampled after in the same step. How many of them count is
known when the step returns; until then the sequence is not planned again. Which rows do, and whether a step waits
for the one in flight so that its rows can, `speculation` says.

The grammar mask of a row depends on the token before, which may still be in flight when the row is planned. So
`masks` makes it when the step is the oldest in flight, and it is sent after the plan.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagewire.engine_core.grammar.matcher import GrammarError
from pagewire.engine_core.schedule.deltas import error_delta, pooled_delta
from pagewire.engine_core.schedule.fairness import HANDOVER_SECONDS, change_of_room, gives_way
from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.micro_batches import micro_batch
from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.schedule.speculation import NoSpeculation, Speculation
from pagewire.engine_core.schedule.step import PlannedStep, SchedulerStats, check_result
from pagewire.engine_core.schedule.stopping import finish_reason, stop_ids
from pagewire.engine_core.schedule.tenants import TenantAccount, Tenants
from pagewire.engine_core.schedule.waiting import WaitingQueue
from pagewire.ipc.codec import Tensor
from pagewire.ipc.messages import TokenDelta
from pagewire.ipc.worker_messages import Masks, Row, RowResult, SlotInit, StepPlan, StepResult

Outcome: TypeAlias = tuple[Sequence, TokenDelta]


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a scheduler.

    depth: maximum number of steps in flight. stages: of the pipeline of workers (`micro_batches`).
    watermark: fraction of the blocks that must stay free when a sequence is admitted, for running ones to grow.
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

    def __post_init__(self) -> None:
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"{self.num_blocks} KV blocks of {self.block_size} tokens do not hold one request of "
                f"max_model_len={self.max_model_len}; give more KV memory, or lower max_model_len to "
                f"{self.num_blocks * self.block_size}"
            )


class Scheduler:
    """Owns all unfinished sequences and all KV blocks.

    speculation: says which rows carry drafts; None: none do.
    running: in order of priority, then arrival. waiting: without a slot, new or preempted. tenants: whose they are.
    """

    def __init__(self, config: SchedulerConfig, speculation: Speculation | None = None) -> None:
        self.config = config
        self.kv = KVCache(config.num_blocks, config.block_size)
        self.speculation = speculation or NoSpeculation()
        self.stats = SchedulerStats(speculation=self.speculation.stats)
        self.running: list[Sequence] = []
        self.tenants = Tenants(TenantAccount)
        self.waiting = WaitingQueue(self._order, self.tenants)
        self.in_flight: deque[PlannedStep] = deque()
        self._free_slots = list(range(config.max_num_seqs))[::-1]
        self._freed_slots: list[int] = []
        self._next_step_id = 0
        self._next_handover = 0.0
        self._watermark = int(config.watermark * config.num_blocks)

    # ------------------------------------------------------------ events

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot: new or preempted."""
        return len(self.waiting)

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting sequences."""
        return len(self.running) + len(self.waiting)

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks in use, 0 to 1."""
        return 1.0 - self.kv.pool.num_free / len(self.kv.pool)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._wait(sequence)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End sequences without a delta; their tokens in flight are dropped on return."""
        for sequence in sequences:
            if not sequence.finished:
                self._finish(sequence)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can or should run now (a commit may change that).

        Raises:
            RuntimeError: `depth` steps are already in flight.
        """
        if len(self.in_flight) >= self.config.depth:
            raise RuntimeError(f"{len(self.in_flight)} steps are in flight")
        if self.in_flight and self.speculation.waits(self.in_flight[-1], self.running, len(self.waiting)):
            return None
        step = PlannedStep(self._next_step_id, self.config.max_num_batched_tokens)
        step.late = not self.in_flight and self.config.depth > 1
        newcomer, leaving = self._hand_over(now)
        # Until `leaving` is preempted none is admitted: it would take blocks that are about to change hands.
        if self._plan_running(step, leaving) and leaving is None:
            self._plan_waiting(step, newcomer, now)
        if not step.rows:
            return None
        self._next_step_id += 1
        self.stats.num_steps += 1
        self.in_flight.append(step)
        freed, self._freed_slots = self._freed_slots, []
        return StepPlan(step.step_id, step.rows, step.inits, freed, step.masked)

    def masks(self, now: float) -> tuple[Masks | None, list[Outcome]]:
        """Grammar masks for the oldest step in flight; None if no row of it has a grammar. Call once per step.

        A sequence whose grammar allows no next token ends with an error: its row gets no mask, and its token is
        dropped.
        """
        if not self.in_flight or not self.in_flight[0].masked:
            return None, []
        step = self.in_flight[0]
        samples: list[int] = []
        bits: list[bytes] = []
        outcomes = []
        num_samples = 0
        for sequence, row in zip(step.sequences, step.rows, strict=True):
            first, num_samples = num_samples, num_samples + row.num_samples
            if not row.num_samples or sequence.matcher is None or sequence.finished:
                continue
            try:
                masks = sequence.matcher.masks(row.drafts)
                bits += masks
                samples += range(first, first + len(masks))
            except GrammarError as error:
                outcomes.append(self._end_with_error(sequence, str(error), now, "ValueError"))
        width = len(bits[0]) // 4 if bits else 0
        return Masks(step.step_id, samples, Tensor("int32", (len(bits), width), b"".join(bits))), outcomes

    def commit(self, result: StepResult, now: float) -> list[Outcome]:
        """Append the tokens of the oldest step in flight; returns the sequences' deltas.

        Raises:
            ValueError: `result` is that of another step, or does not fit the step's rows.
        """
        if not self.in_flight or self.in_flight[0].step_id != result.step_id:
            raise ValueError(f"the result of step {result.step_id} is not that of the oldest step in flight")
        step = self.in_flight[0]
        if len(result.rows) != len(step.rows):
            raise ValueError(f"step {step.step_id} of {len(step.rows)} rows returned {len(result.rows)}")
        for sequence, row, row_result in zip(step.sequences, step.rows, result.rows, strict=True):
            check_result(row, row_result, row.start + row.num_tokens == sequence.num_prompt_tokens)
        self.in_flight.popleft()
        outcomes = []
        for sequence, row, row_result in zip(step.sequences, step.rows, result.rows, strict=True):
            sequence.land()
            if not sequence.finished:
                delta = self._commit_row(sequence, row, row_result, now)
                if delta is not None:
                    outcomes.append((sequence, delta))
        self.speculation.measure(step, result, goes_on=bool(self.running))
        return outcomes

    def fail(self, now: float) -> list[Outcome]:
        """Queue every running sequence again, because the worker and with it all KV is lost.

        One that is `suspect` of the crash runs alone from then on; one that is `guilty` ends with an error.
        Returns the deltas of such ends.
        """
        for sequence in {sequence for step in self.in_flight for sequence in step.sequences}:
            sequence.crash()
        self.in_flight.clear()
        outcomes = []
        for sequence in list(self.running):
            if sequence.guilty:
                text = f"the worker crashed {sequence.num_relapses} times while it ran this request"
                outcomes.append(self._end_with_error(sequence, text, now))
            else:
                self._stop_running(sequence)
                self._wait(sequence)
        self.kv.pool.forget()
        self._freed_slots.clear()
        return outcomes

    def preempt_all(self) -> bool:
        """Preempt every running sequence. Returns False, and does nothing, while steps are in flight."""
        if self.in_flight:
            return False
        for sequence in list(self.running):
            self._preempt(sequence)
        return True

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and does nothing, while sequences are running."""
        if self.running:
            return False
        self.kv.pool.forget()
        return True

    # ------------------------------------------------------------ planning

    def _hand_over(self, now: float) -> tuple[Sequence | None, Sequence | None]:
        """Preempt a sequence that makes room for another tenant or request which has none.

        Returns the sequence that gets the room, or else the one that gives it once its step in flight is over.
        """
        if now < self._next_handover:
            return None, None
        change = change_of_room(self.waiting, self.running, self._order, now)
        if change is None:
            return None, None
        newcomer, leaving = change
        if self._free_slots and self.kv.fits(newcomer, 0):
            return newcomer, None
        if leaving.in_flight:
            return None, leaving
        self._preempt(leaving)
        return newcomer, None

    def _plan_running(self, step: PlannedStep, leaving: Sequence | None) -> bool:
        """Plan running sequences but `leaving`. False if blocks ran out, so that no waiting one may be admitted."""
        num_preemptions = self.stats.num_preemptions
        batch = micro_batch(self.running, self.config.stages, self.config.depth, len(self.in_flight))
        others = self.num_unfinished - len(batch)
        chosen = self.speculation.choose(batch, others, step.budget, ahead=bool(self.in_flight))
        for sequence in batch:
            if step.budget == 0:
                break
            num_left = sequence.num_to_compute
            if num_left == 0 or sequence.state is not State.RUNNING or sequence is leaving:
                continue
            count = self._chunk(sequence, num_left, step)
            if count == 0:  # a medium is larger than what is left of the budget, and nothing may pass it
                return False
            missing = self.kv.missing(sequence, sequence.computed + count)
            if missing and not self._make_room(sequence, missing):
                if sequence.slot >= 0:
                    return False
                continue  # it was preempted itself, as one of the most served tenant
            drafts = self._fitting(chosen.get(sequence, []), sequence, count, missing, step)
            self._schedule(step, sequence, count, drafts)
        if num_preemptions == self.stats.num_preemptions:
            return True
        if not step.rows:  # all of a micro-batch were preempted, and left their room to the others
            self._plan_running(step, leaving)
        return False

    def _plan_waiting(self, step: PlannedStep, newcomer: Sequence | None, now: float) -> None:
        """Admit waiting sequences while there is room; `newcomer` also gets what is kept free for running ones."""
        suspects = self.waiting.suspects
        if suspects:
            if not self.running and not self.in_flight:  # alone means: without leftover rows either
                self._admit(step, suspects[0], 0, now)
            return
        if len(self.running) == 1 and self.running[0].suspect:
            return
        if newcomer is not None:
            if step.budget and self._free_slots and self._admit(step, newcomer, 0, now):
                self._next_handover = now + HANDOVER_SECONDS
            return
        while step.budget and self._free_slots and (sequence := self.waiting.first()) is not None:
            if not self._admit(step, sequence, self._watermark if self.running else 0, now):
                break

    def _admit(self, step: PlannedStep, sequence: Sequence, watermark: int, now: float) -> bool:
        """Give a waiting sequence blocks and a slot, and plan its first chunk; False if it does not fit."""
        if not self.kv.admit(sequence, watermark):
            return False
        count = self._chunk(sequence, sequence.num_to_compute, step)
        if count == 0:  # it goes on with a medium that is larger than what is left of the budget
            self.kv.free(sequence)
            return False
        self.waiting.remove(sequence)
        sequence.state, sequence.slot = State.RUNNING, self._free_slots.pop()
        insort(self.running, sequence, key=self._order)
        self.tenants.selected(sequence.tenant)
        num_charged = 0
        if sequence.num_cached_tokens is None:
            num_charged = len(sequence.token_ids) - sequence.computed
            sequence.num_cached_tokens = sequence.computed
            sequence.scheduled_time = now
            self.stats.num_prefix_queries += len(sequence.token_ids)
            self.stats.num_prefix_hits += sequence.computed
        sequence.tenant.admit(sequence.turn, num_charged)
        step.inits.append(
            SlotInit(
                slot=sequence.slot,
                token_ids=sequence.send_tokens(0),
                num_prompt_tokens=sequence.num_prompt_tokens,
                block_ids=[block.block_id for block in sequence.blocks],
                task=sequence.request.task,
                seed=sequence.seed,
                stop_ids=[] if sequence.pools else stop_ids(sequence),
                media=sequence.request.prompt.places(),
                adapter=0 if sequence.adapter is None else sequence.adapter.index,
            )
        )
        self._schedule(step, sequence, count, [])
        return True

    def _chunk(self, sequence: Sequence, num_left: int, step: PlannedStep) -> int:
        """Number of tokens of the sequence to run in this step, of `num_left`."""
        count = min(num_left, step.budget)
        start, returned = sequence.computed, sequence.num_prompt_logprobs
        if start >= sequence.num_prompt_tokens:
            return count
        if start < returned < sequence.num_prompt_tokens - 1:
            # These prompt log probabilities were returned before a preemption: recompute in a chunk without them.
            count = min(count, returned - start)
        return sequence.boundary(start + count) - start

    def _fitting(
        self, drafts: list[int], sequence: Sequence, count: int, missing: int, step: PlannedStep
    ) -> list[int]:
        """Drafts behind the next `count` tokens, as far as the budget and blocks that no other row needs reach."""
        num_spare = max(0, self.kv.pool.num_free - missing - len(self.running))
        num_places = (len(sequence.blocks) + missing + num_spare) * self.config.block_size
        num_places = min(num_places, sequence.angles_end)
        return drafts[: max(0, min(step.budget - count, num_places - sequence.computed - count))]

    def _schedule(self, step: PlannedStep, sequence: Sequence, count: int, drafts: list[int]) -> None:
        start, end = sequence.computed, sequence.computed + count
        num_tokens = count + len(drafts)
        samples = not sequence.pools and end == len(sequence.token_ids) + sequence.num_pending
        num_samples = 1 + len(drafts) if samples else 0
        missing = self.kv.missing(sequence, start + num_tokens)
        new_block_ids = self.kv.grow(sequence, missing) if missing else []
        row = Row(sequence.slot, start, num_tokens, new_block_ids, drafts, num_samples, 0, sequence.pools)
        if self.config.stages > 1:
            row.token_ids = sequence.send_tokens(sequence.num_sent)
        if num_samples:
            row.num_drafts = self.speculation.num_asked(sequence)
            step.num_asked += row.num_drafts
        if sequence.returns_prompt_logprobs and start >= sequence.num_prompt_logprobs:
            row.num_prompt_logprobs = max(0, min(end, sequence.num_prompt_tokens - 1) - start)
        step.sequences.append(sequence)
        step.rows.append(row)
        step.budget -= num_tokens
        step.num_drafts += len(drafts)
        if num_samples and sequence.matcher is not None:
            step.masked = True
        if start < sequence.num_prompt_tokens:
            row.media = sequence.request.prompt.embeddings(start, end)
            num_prompt_tokens = min(end, sequence.num_prompt_tokens) - start
            step.num_prompt_tokens += num_prompt_tokens
            self.stats.num_prompt_tokens += num_prompt_tokens
        sequence.launch(num_tokens, num_samples)
        self.kv.register(sequence)

    def _make_room(self, sequence: Sequence, missing: int) -> bool:
        """Free `missing` blocks by preempting others; False if `sequence` must wait, or was preempted itself."""
        while self.kv.pool.num_free < missing:
            victim = gives_way(sequence, self.running, self._order)
            if victim.in_flight:
                return False
            self.stats.num_cache_preemptions += 1
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    # ------------------------------------------------------------ committing

    def _commit_row(self, sequence: Sequence, row: Row, result: RowResult, now: float) -> TokenDelta | None:
        if result.error is not None:
            return self._end_with_error(sequence, result.error, now, result.error_type)[1]
        if result.prompt_logprobs is not None:
            sequence.num_prompt_logprobs = row.start + row.num_prompt_logprobs
        if result.pooled is not None:
            self._finish(sequence)
            return pooled_delta(sequence, result.pooled, now)
        if not result.token_ids:
            if result.prompt_logprobs is None:
                return None
            return TokenDelta(sequence.key, sequence.index, [], prompt_logprobs=result.prompt_logprobs)
        if row.drafts:
            sequence.rewind(row.num_samples - len(result.token_ids))
        first = sequence.first_token_time == 0.0
        try:
            num_tokens, reason, stop_token = self._append(sequence, result.token_ids, now)
        except GrammarError as error:
            return self._end_with_error(sequence, str(error), now, "ValueError")[1]
        num_accepted = self.speculation.take(sequence, row, result, num_tokens)
        if reason is not None:
            self._finish(sequence)
        elif len(sequence.token_ids) > sequence.angles_end:  # it began no step with the last of these tokens
            self._stop_running(sequence)
            self._wait(sequence)
        return TokenDelta(
            sequence.key,
            sequence.index,
            result.token_ids[:num_tokens],
            finish_reason=reason,
            stop_reason=stop_token,
            logprobs=None if result.logprobs is None else result.logprobs.first(num_tokens),
            prompt_logprobs=result.prompt_logprobs,
            num_cached_tokens=sequence.num_cached_tokens if first or reason else None,
            timing=sequence.timing(now) if first or reason else None,
            num_drafts=len(row.drafts),
            num_accepted=num_accepted,
        )

    def _append(
        self, sequence: Sequence, token_ids: list[int], now: float
    ) -> tuple[int, str | None, int | None]:
        """Append tokens up to one that ends the sequence; returns how many, and as `finish_reason`.

        Raises:
            GrammarError: a token does not fit the grammar.
        """
        num_tokens, reason, stop_token = 0, None, None
        for token_id in token_ids:
            if sequence.matcher is not None:
                sequence.matcher.accept(token_id)
            sequence.token_ids.append(token_id)
            num_tokens += 1
            reason, stop_token = finish_reason(sequence)
            if reason is not None:
                break
        if sequence.num_relapses:
            sequence.survive(alone=len(self.running) == 1)
        if sequence.first_token_time == 0.0:
            sequence.first_token_time = now
        else:
            sequence.token_gap = (now - sequence.last_token_time) / num_tokens
        sequence.last_token_time = now
        self.stats.num_output_tokens += num_tokens
        sequence.tenant.num_output_tokens += num_tokens
        return num_tokens, reason, stop_token

    def _end_with_error(
        self, sequence: Sequence, text: str, now: float, error_type: str | None = None
    ) -> Outcome:
        self._finish(sequence)
        return sequence, error_delta(sequence, text, now, error_type)

    # ------------------------------------------------------------ states

    def _order(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.request.priority if self.config.policy == "priority" else 0, sequence.arrival)

    def _wait(self, sequence: Sequence) -> None:
        sequence.choose_angles()
        self.waiting.add(sequence, alone=sequence.suspect)

    def _preempt(self, sequence: Sequence) -> None:
        self.stats.num_preemptions += 1
        if sequence.request.rank:  # the later part of a batch queues behind what waits already
            sequence.turn = max(sequence.turn, sequence.tenant.clock + 1)
        self._stop_running(sequence)
        self._wait(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        """Free blocks and slot of a running sequence; safe with steps in flight, as workers run plans in order."""
        self.running.remove(sequence)
        sequence.tenant.num_running -= 1
        self.kv.free(sequence)
        self._free_slots.append(sequence.slot)
        self._freed_slots.append(sequence.slot)
        self.speculation.forget(sequence)
        sequence.slot = -1

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.kv.register(sequence)
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        self.speculation.end(sequence)
