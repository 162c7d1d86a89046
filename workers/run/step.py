"""One step on the device: launched, then sampled, then finished.

On an asynchronous device the next step is launched before this one is finished, taking this one's tokens from the
device (`slots.Relay`). It is sampled after this one is finished: penalties and grammars need its tokens.

What takes the other ranks of a group is launched by `StepLauncher.launch` and `sample`, not when a step is found
to be over: whether that is before the next one is launched or after it differs between ranks. So a step of a group
that drafts is finished at once, behind its sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.worker_messages import Masks, Row, RowResult, StepPlan, StepResult, Way
from pagewire.workers.batch.flat_batch import AdapterOrder, Batch
from pagewire.workers.device.interface import Event, PendingTokens
from pagewire.workers.device.kv_size import LOGIT_CHUNK
from pagewire.workers.run.environment import StepEnvironment
from pagewire.workers.run.pooling import PooledRow, pool_rows
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.sampler import NO_TOKEN_POSSIBLE, SampleOutput, SamplingSlot, logprob_rows
from pagewire.workers.sample.typical import Candidate, TypicalAcceptance
from pagewire.workers.speculation.interface import RowOver

NOTHING = torch.empty(0)


@dataclass(frozen=True)
class PromptLogprobsRequest:
    """A row whose prompt log probabilities are requested."""

    row: int
    start: int
    """Index of its first token in the batch."""
    successors: list[int]
    """The prompt tokens whose log probabilities are requested: each follows one of the row's first tokens."""
    num_most_likely: int


class RunningStep:
    """A plan whose model work has been launched; made by `StepLauncher.launch`.

    errors: of rows whose media could not be encoded, by row. num_further: steps of the plan that are left.
    encoder_begin: the event before media were encoded; None: the plan encodes none.
    """

    def __init__(self, env: StepEnvironment, plan: StepPlan, begin: Event, way: Way) -> None:
        self._env, self.plan, self._begin, self._way = env, plan, begin, way
        self._end = begin
        self.encoder_begin: Event | None = None
        self.errors: Mapping[int, str] = {}
        self._sampled: PendingTokens | None = None
        self._passed_on = False
        self._batch: Batch | None = None
        self._hidden = self._sampled_hidden = NOTHING
        self._features: Tensor | None = None
        self._slots: list[SamplingSlot] = []
        self._sequences: list[SamplingSlot | None] = []  # of each row, if a drafter is to see them
        self._prompts: list[PromptLogprobsRequest] = []
        self._prompt_logprobs: dict[int, LogprobRows] = {}  # by row
        self._pooled: list[PooledRow] = []
        self.num_further = plan.num_steps - 1

    def run(self, batch: Batch, hidden: Tensor) -> None:
        """Take over the launched work. batch: on the device. hidden: its final hidden states [T or more, H]."""
        slots = self._env.slots
        self._batch, self._hidden = batch, hidden
        self._slots = [slots.sampling[self.plan.rows[i].slot] for i in batch.sample_rows]
        if self._env.parts.drafter.follows or any(row.num_drafts for row in self.plan.rows):
            self._sequences = [slots.sampling.get(row.slot) for row in self.plan.rows]
            self._features = self._env.parts.drafter.features(hidden)
        self._pooled = [
            PooledRow(i, row, slots.pooling[row.slot], batch.starts[i])
            for i, row in enumerate(self.plan.rows)
            if row.pool
        ]
        for i, row in enumerate(self.plan.rows):
            if row.num_prompt_logprobs:
                first = row.start + 1
                successors = slots.tokens[row.slot, first : first + row.num_prompt_logprobs].tolist()
                k = slots.sampling[row.slot].params.prompt_logprobs or 0
                self._prompts.append(PromptLogprobsRequest(i, batch.starts[i], successors, k))
        self._end = self._env.device.record_event()

    def pass_on(self) -> None:
        """The launched work is that of a stage before the last: nothing is sampled, and the result has no rows."""
        self._passed_on = True
        self._end = self._env.device.record_event()

    @torch.inference_mode()
    def sample(self, masks: Callable[[], Masks | None]) -> None:
        """Launch sampling; all earlier steps must be finished. masks: waits for the masks of a masked plan.

        Log probabilities of prompts are computed here, for which it waits until the model has run.
        """
        env, batch = self._env, self._batch
        for request in self._prompts:
            self._prompt_logprobs[request.row] = self._logprobs_of(request)
        if batch is None or not self._slots:
            return
        with env.profiler.span("logits"):
            adapters = env.parts.adapters.rows(batch.sample_adapters)
            self._sampled_hidden = self._hidden
            # Indices are ascending: as many as tokens are all of them, as when all rows decode. On an asynchronous
            # device the next step may overwrite the states.
            if env.device.asynchronous or batch.sample_indices.shape != self._hidden.shape[:1]:
                self._sampled_hidden = self._hidden.index_select(0, batch.sample_indices)
            logits = env.model.current.model.logits(self._sampled_hidden, adapters)
        with env.profiler.span("masks"):
            allowed = TokenMasks.of(masks() if self.plan.masked else None).widened(logits.shape[1])
        with env.profiler.span("sample"):
            self._sampled = env.sampler.launch(logits, self._states(), allowed)
            env.keep_tokens(batch.sample_slots, self._sampled)
        self._end = env.device.record_event()

    def reached(self) -> bool:
        """True if `finish` is to be called now: it would not have to wait, or it drafts with other ranks."""
        if self._sequences and self._env.collective.size > 1:
            return True
        return self._end.reached() and (self._sampled is None or self._sampled.reached())

    def finish(self, since: Event | None = None) -> StepResult:
        """Wait for the step and append its tokens to their slots. since: the end of the previous step."""
        rows = [] if self._passed_on else self.plan.rows
        result = StepResult(self.plan.step_id, [RowResult() for _ in rows], way=self._way)
        if self._sampled is not None:
            self._take(self._sampled.finish(), result)
        for row, logprobs in self._prompt_logprobs.items():
            result.rows[row].prompt_logprobs = logprobs
        if self._pooled:
            with self._env.profiler.span("pool"), torch.inference_mode():
                pooler = self._env.model.current.pooler
                assert pooler is not None, "rows to pool are of a model that pools"
                pool_rows(pooler, self._pooled, self._hidden, self._env.slots, result)
            self._end = self._env.device.record_event()
        if self._sequences:
            self._draft(result)
        if rows:
            for i, error in self.errors.items():
                result.rows[i] = RowResult(error=error, is_spoiled=True)
        self._end.wait()
        set_times(result, self._begin, self._end, since, self.encoder_begin)
        return result

    @property
    def end(self) -> Event:
        """The event behind the step's last work."""
        return self._end

    def _states(self) -> Sequence[SamplingSlot]:
        """The sampler's state at each sample: that of its slot, with the drafts before the sample appended."""
        if self._batch is None or not self._batch.drafted:
            return self._slots
        sampling, rule = self._env.slots.sampling, self._env.typical
        return [
            sampling[row.slot].ahead(row.drafts[:n], candidate(row, n, rule))
            for row in self.plan.rows
            for n in range(row.num_samples)
        ]

    def _take(self, output: SampleOutput, result: StepResult) -> None:
        slots, first = self._env.slots, 0
        for i, row in enumerate(self.plan.rows):
            if not row.num_samples:
                continue
            result.rows[i] = row_result(row, output, first)
            # Otherwise the slot has a new sequence, and the tokens are dropped.
            if slots.sampling.get(row.slot) is self._slots[first]:
                for token_id in result.rows[i].token_ids or output.token_ids[first : first + 1]:
                    slots.append(row.slot, token_id)
            first += row.num_samples

    @torch.inference_mode()
    def _draft(self, result: StepResult) -> None:
        """Add drafts to the results of rows that want some."""
        env = self._env
        drafter, rows = env.parts.drafter, self._rows_over(result)
        if not rows:
            return
        with env.profiler.span("draft"):
            for i, drafts in zip(rows, drafter.propose(list(rows.values()), self._features), strict=True):
                result.rows[i].drafts = drafts
        self._end = env.device.record_event()

    def _rows_over(self, result: StepResult) -> dict[int, RowOver]:
        """The rows that the drafter is to see, by index; without those whose slot has a new sequence by now."""
        batch, sampling, sample = self._batch, self._env.slots.sampling, 0
        follows = self._env.parts.drafter.follows
        rows: dict[int, RowOver] = {}
        for i, (row, sequence) in enumerate(zip(self.plan.rows, self._sequences, strict=True)):
            first, sample = sample, sample + row.num_samples
            count = len(result.rows[i].token_ids)
            if not (row.num_drafts or follows) or sampling.get(row.slot) is not sequence:
                continue
            if sequence is None or batch is None or (row.num_samples and not count):
                continue
            hidden = self._sampled_hidden[first + count - 1] if count else None
            num_tokens = row.num_tokens - (row.num_samples - count)
            num_drafts = row.num_drafts if count else 0
            rows[i] = RowOver(row.slot, row.start, num_tokens, batch.starts[i], num_drafts, hidden)
        return rows

    def _logprobs_of(self, request: PromptLogprobsRequest) -> LogprobRows:
        """Log probabilities of prompt tokens, from the logits at the tokens before them."""
        model = self._env.model.current
        size = max(1, LOGIT_CHUNK // model.vocab_size)
        end = request.start + len(request.successors)
        adapter = self._env.slots.adapters[self.plan.rows[request.row].slot]

        parts = []
        for start in range(request.start, end, size):  # the logits of all of them may not fit into memory
            hidden = self._hidden[start : min(start + size, end)]
            order = AdapterOrder.of(np.full(len(hidden), adapter))
            logits = model.model.logits(hidden, self._env.parts.adapters.rows(order)).cpu()
            successors = request.successors[start - request.start :][: len(hidden)]
            parts.append(logprob_rows(logits, successors, request.num_most_likely))
        rows = LogprobRows.join(parts)
        assert rows is not None, "a request has at least one token"
        return rows


@dataclass
class FinishedStep:
    """A plan that has run to its end; as a `RunningStep`."""

    plan: StepPlan
    result: StepResult
    begin: Event
    end: Event
    encoder_begin: Event | None = None
    num_further = 0

    def reached(self) -> bool:
        """True: the work is done."""
        return True

    def sample(self, masks: Callable[[], Masks | None]) -> None:
        """Nothing: the tokens are sampled."""

    def finish(self, since: Event | None = None) -> StepResult:
        """See `RunningStep.finish`."""
        set_times(self.result, self.begin, self.end, since, self.encoder_begin)
        return self.result


def set_times(
    result: StepResult, begin: Event, end: Event, since: Event | None, encoder_begin: Event | None
) -> None:
    """Say in a result how long its step has taken. since: the end of the previous step; None: it is not known."""
    result.busy_us = int(end.seconds_since(begin) * 1e6)
    first = begin
    if encoder_begin is not None:
        first = encoder_begin
        result.encode_us = int(begin.seconds_since(encoder_begin) * 1e6)
    if since is not None:
        result.idle_us = max(0, int(first.seconds_since(since) * 1e6))


def candidate(row: Row, sample: int, rule: TypicalAcceptance | None) -> Candidate | None:
    """The draft in the place of one of a row's samples, if it may count without being drawn."""
    return Candidate(row.drafts[sample], rule) if rule is not None and sample < len(row.drafts) else None


def row_result(row: Row, output: SampleOutput, first: int) -> RowResult:
    """The result of a row whose samples begin at `first`; they count up to the first that is not the draft.

    A draft that typical acceptance has accepted is the sample in its place (`sample/typical.py`).
    """
    if (error := output.errors.get(first)) is not None:  # a mistake of the request, or of the model
        kind = "ValueError" if error == NO_TOKEN_POSSIBLE else output.error_types.get(first)
        return RowResult(error=error, error_type=kind)
    if not row.drafts:
        return RowResult([output.token_ids[first]], output.logprobs.get(first))
    count = 1
    for draft in row.drafts:
        sample = first + count
        if output.token_ids[sample - 1] != draft or sample in output.errors:
            break
        count += 1
    here = range(first, first + count)
    logprobs = LogprobRows.join([output.logprobs[sample] for sample in here if sample in output.logprobs])
    return RowResult(output.token_ids[first : first + count], logprobs)
