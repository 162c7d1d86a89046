"""The scheduler: decides which tokens run in the next step. Pure: no IO, no clock, no torch.

    add(request)   plan() -> StepPlan   commit(StepResult) -> deltas   abort(requests)   fail() -> deltas

Each plan spends one token budget: running sequences first, in order, then waiting ones while budget, slots and
blocks last. There are no prefill and decode phases: a sequence runs the tokens that it has not computed yet, in
chunks if necessary. Up to `depth` plans may be in flight. The next one is made before the tokens of the last one
are known, so a sequence that ends with a stop token may have one row too many in flight; the token of that row is
dropped. An end by length is known in advance.

When blocks run out, the last running sequence is preempted: its blocks are freed, and it is recomputed later. A
sequence with a step in flight cannot be preempted. So nothing behind the sequence that lacks blocks is planned,
and one step later the last sequence is idle.

The grammar mask of a row depends on the token before, which may still be in flight when the row is planned. So
`masks` makes it when the step is the oldest in flight, and it is sent after the plan.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pagewire.engine_core.grammar.matcher import GrammarError
from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.schedule.stopping import finish_reason, stop_ids
from pagewire.ipc.codec import Tensor
from pagewire.ipc.messages import Masks, Row, SlotInit, StepPlan, StepResult, TokenDelta

Outcome: TypeAlias = tuple[Sequence, TokenDelta]

CRASHES_TO_ISOLATE = 2  # worker crashes after which a sequence runs alone, to find the one that causes them
MAX_STALE = (
    64  # finished entries that the heap may hold beyond the number of waiting ones, before it is rebuilt
)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a scheduler.

    depth: maximum number of steps in flight.
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

    def __post_init__(self) -> None:
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"{self.num_blocks} KV blocks of {self.block_size} tokens do not hold one request of "
                f"max_model_len={self.max_model_len}; give more KV memory, or lower max_model_len to "
                f"{self.num_blocks * self.block_size}"
            )


@dataclass(slots=True)
class PlannedStep:
    """A step that is being planned or in flight; `requests[i]` is the sequence of `rows[i]`.

    budget: tokens that may still be added. num_prompt_tokens: prompt tokens among those of the rows.
    masked: some row samples under a grammar.
    """

    step_id: int
    budget: int
    requests: list[Sequence] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    inits: list[SlotInit] = field(default_factory=list)
    num_prompt_tokens: int = 0
    masked: bool = False


@dataclass
class SchedulerStats:
    """Counts since the core started."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class Scheduler:
    """Owns all unfinished sequences and all KV blocks.

    running: in order of priority, then arrival. suspects: waiting to run alone, see `fail`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVCache(config.num_blocks, config.block_size)
        self.stats = SchedulerStats()
        self.running: list[Sequence] = []
        self.in_flight: deque[PlannedStep] = deque()
        self.suspects: list[Sequence] = []
        self._waiting: list[
            tuple[int, int, Sequence]
        ] = []  # a heap; finished entries are skipped when they come up
        self._num_waiting = 0
        self._free_slots = list(range(config.max_num_seqs))[::-1]
        self._freed_slots: list[int] = []
        self._next_step_id = 0
        self._watermark = int(config.watermark * config.num_blocks)

    # ------------------------------------------------------------ events

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot: new or preempted."""
        return self._num_waiting + len(self.suspects)

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting sequences."""
        return len(self.running) + self.num_waiting

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks in use, 0 to 1."""
        return 1.0 - self.kv.pool.num_free / len(self.kv.pool)

    def add(self, request: Sequence) -> None:
        """Queue a sequence."""
        self._wait(request)

    def abort(self, requests: Iterable[Sequence]) -> None:
        """End sequences without a delta; their tokens in flight are dropped on return."""
        for request in requests:
            if not request.finished:
                self._finish(request)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run now (a commit may change that).

        Raises:
            RuntimeError: `depth` steps are already in flight.
        """
        if len(self.in_flight) >= self.config.depth:
            raise RuntimeError(f"{len(self.in_flight)} steps are in flight")
        step = PlannedStep(self._next_step_id, self.config.max_num_batched_tokens)
        if self._plan_running(step):
            self._plan_waiting(step, now)
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
        rows, bits, outcomes = [], [], []
        for i, (request, row) in enumerate(zip(step.requests, step.rows, strict=True)):
            if not row.sample or request.matcher is None or request.finished:
                continue
            try:
                bits.append(request.matcher.mask())
                rows.append(i)
            except GrammarError as error:
                outcomes.append(self._end_with_error(request, str(error), now))
        width = len(bits[0]) // 4 if bits else 0
        return Masks(step.step_id, rows, Tensor("int32", (len(rows), width), b"".join(bits))), outcomes

    def commit(self, result: StepResult, now: float) -> list[Outcome]:
        """Append the tokens of the oldest step in flight; returns the sequences' deltas.

        Raises:
            ValueError: `result` is that of another step, or its number of tokens is wrong.
        """
        if not self.in_flight or self.in_flight[0].step_id != result.step_id:
            raise ValueError(f"the result of step {result.step_id} is not that of the oldest step in flight")
        step = self.in_flight[0]
        if len(result.token_ids) != sum(row.sample for row in step.rows):
            raise ValueError(f"step {step.step_id} returned {len(result.token_ids)} tokens")
        self.in_flight.popleft()
        tokens = iter(result.token_ids)
        outcomes = []
        for i, (request, row) in enumerate(zip(step.requests, step.rows, strict=True)):
            token_id = next(tokens) if row.sample else None
            request.num_in_flight -= 1
            request.num_pending -= row.sample
            if not request.finished:
                delta = self._commit_row(request, row, i, token_id, result, now)
                if delta is not None:
                    outcomes.append((request, delta))
        return outcomes

    def fail(self, now: float) -> list[Outcome]:
        """Queue every running sequence again, because the worker and with it all KV is lost.

        A sequence that was in flight at `CRASHES_TO_ISOLATE` crashes since its last token runs alone from then on.
        If the worker crashes again, the sequence ends with an error. Returns the deltas of such ends.
        """
        crashed = {id(request): request for step in self.in_flight for request in step.requests}
        for request in crashed.values():
            request.num_crashes += 1
            request.num_pending = request.num_in_flight = 0
        self.in_flight.clear()
        outcomes = []
        for request in list(self.running):
            if request.num_crashes > CRASHES_TO_ISOLATE:
                text = f"the worker crashed {request.num_crashes} times while it ran this request"
                outcomes.append(self._end_with_error(request, text, now))
            else:
                self._stop_running(request)
                self._wait(request)
        self.kv.pool.forget()
        self._freed_slots.clear()
        return outcomes

    def preempt_all(self) -> bool:
        """Preempt every running sequence. Returns False, and does nothing, while steps are in flight."""
        if self.in_flight:
            return False
        for request in list(self.running):
            self._preempt(request)
        return True

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and does nothing, while sequences are running."""
        if self.running:
            return False
        self.kv.pool.forget()
        return True

    # ------------------------------------------------------------ planning

    def _plan_running(self, step: PlannedStep) -> bool:
        """Plan running sequences. False if blocks ran out, so that no waiting one may be admitted."""
        num_preemptions = self.stats.num_preemptions
        for request in list(self.running):
            if step.budget == 0:
                break
            count = self._chunk(request, step)
            if count == 0 or request.state is not State.RUNNING:
                continue
            missing = self.kv.missing(request, request.computed + count)
            if missing and not self._make_room(request, missing):
                return False
            self._schedule(step, request, count, self.kv.grow(request, missing))
        return num_preemptions == self.stats.num_preemptions

    def _plan_waiting(self, step: PlannedStep, now: float) -> None:
        if self.suspects:
            if not self.running and not self.in_flight:  # alone means: without leftover rows either
                self._admit(step, self.suspects[0], now)
            return
        if len(self.running) == 1 and self.running[0].num_crashes >= CRASHES_TO_ISOLATE:
            return
        while step.budget and self._free_slots:
            request = self._next_waiting()
            if request is None or not self._admit(step, request, now):
                break

    def _admit(self, step: PlannedStep, request: Sequence, now: float) -> bool:
        """Give a waiting sequence blocks and a slot, and plan its first chunk; False if it does not fit."""
        if not self.kv.admit(request, self._watermark if self.running else 0):
            return False
        self._leave_waiting(request)
        request.state, request.slot = State.RUNNING, self._free_slots.pop()
        insort(self.running, request, key=self._order)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.computed
            request.scheduled_time = now
            self.stats.num_prefix_queries += len(request.token_ids)
            self.stats.num_prefix_hits += request.computed
        step.inits.append(
            SlotInit(
                slot=request.slot,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=[block.block_id for block in request.blocks],
                params=request.params,
                seed=request.seed,
                stop_ids=stop_ids(request),
            )
        )
        self._schedule(step, request, self._chunk(request, step), [])
        return True

    def _chunk(self, request: Sequence, step: PlannedStep) -> int:
        """Number of tokens of the sequence to run in this step."""
        count = min(request.num_to_compute, step.budget)
        if request.computed < request.num_prompt_logprobs:
            # These prompt log probabilities were returned before a preemption: recompute in a chunk without them.
            count = min(count, request.num_prompt_logprobs - request.computed)
        return count

    def _schedule(self, step: PlannedStep, request: Sequence, count: int, new_block_ids: list[int]) -> None:
        start, end = request.computed, request.computed + count
        row = Row(
            request.slot, start, count, new_block_ids, end == len(request.token_ids) + request.num_pending
        )
        if request.wants_prompt_logprobs and start >= request.num_prompt_logprobs:
            row.num_prompt_logprobs = max(0, min(end, request.num_prompt_tokens - 1) - start)
        step.requests.append(request)
        step.rows.append(row)
        step.budget -= count
        step.masked |= row.sample and request.matcher is not None
        num_prompt_tokens = max(0, min(end, request.num_prompt_tokens) - start)
        step.num_prompt_tokens += num_prompt_tokens
        self.stats.num_prompt_tokens += num_prompt_tokens
        request.computed = end
        request.num_in_flight += 1
        request.num_pending += row.sample
        self.kv.register(request)

    def _make_room(self, request: Sequence, missing: int) -> bool:
        """Free `missing` blocks by preempting the last sequences; False if `request` must wait."""
        while self.kv.pool.num_free < missing:
            victim = self.running[-1]
            if victim.num_in_flight:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    # ------------------------------------------------------------ committing

    def _commit_row(
        self, request: Sequence, row: Row, index: int, token_id: int | None, result: StepResult, now: float
    ) -> TokenDelta | None:
        if index in result.errors:
            return self._end_with_error(request, result.errors[index], now)[1]
        prompt_logprobs = result.prompt_logprobs.get(index)
        if prompt_logprobs is not None:
            request.num_prompt_logprobs = row.start + row.num_prompt_logprobs
        if token_id is None:
            if prompt_logprobs is None:
                return None
            return TokenDelta(request.key, request.index, [], prompt_logprobs=prompt_logprobs)
        try:
            if request.matcher is not None:
                request.matcher.accept(token_id)
        except GrammarError as error:
            return self._end_with_error(request, str(error), now)[1]
        first = request.first_token_time == 0.0
        self._append(request, token_id, now)
        reason, stop_token = finish_reason(request)
        if reason is not None:
            self._finish(request)
        return TokenDelta(
            request.key,
            request.index,
            [token_id],
            finish_reason=reason,
            stop_reason=stop_token,
            logprobs=result.logprobs.get(index),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens if first or reason else None,
            timing=request.timing(now) if first or reason else None,
        )

    def _append(self, request: Sequence, token_id: int, now: float) -> None:
        request.token_ids.append(token_id)
        request.num_crashes = 0
        if request.first_token_time == 0.0:
            request.first_token_time = now
        else:
            request.token_gap = now - request.last_token_time
        request.last_token_time = now
        self.stats.num_output_tokens += 1

    def _end_with_error(self, request: Sequence, text: str, now: float) -> Outcome:
        self._finish(request)
        delta = TokenDelta(
            request.key, request.index, [], finish_reason="error", error=text, timing=request.timing(now)
        )
        return request, delta

    # ------------------------------------------------------------ states

    def _order(self, request: Sequence) -> tuple[int, int]:
        return (request.priority if self.config.policy == "priority" else 0, request.arrival)

    def _wait(self, request: Sequence) -> None:
        request.state = State.WAITING
        if request.num_crashes >= CRASHES_TO_ISOLATE:
            insort(self.suspects, request, key=self._order)
        else:
            heapq.heappush(self._waiting, (*self._order(request), request))
            self._num_waiting += 1

    def _next_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][-1].state is not State.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][-1] if self._waiting else None

    def _leave_waiting(self, request: Sequence) -> None:
        if request in self.suspects:
            self.suspects.remove(request)
        else:
            self._num_waiting -= 1
            if self._waiting[0][-1] is request:
                heapq.heappop(self._waiting)  # anywhere else in the heap it is skipped when it comes up
            elif len(self._waiting) > 2 * self._num_waiting + MAX_STALE:
                waiting = (entry for entry in self._waiting if entry[-1].state is State.WAITING)
                self._waiting = [entry for entry in waiting if entry[-1] is not request]
                heapq.heapify(self._waiting)

    def _preempt(self, request: Sequence) -> None:
        self.stats.num_preemptions += 1
        self._stop_running(request)
        self._wait(request)

    def _stop_running(self, request: Sequence) -> None:
        """Free blocks and slot of a running sequence; safe with steps in flight, as workers run plans in order."""
        self.running.remove(request)
        self.kv.free(request)
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1

    def _finish(self, request: Sequence) -> None:
        if request.state is State.RUNNING:
            self.kv.register(request)
            self._stop_running(request)
        else:
            self._leave_waiting(request)
        request.state = State.FINISHED
