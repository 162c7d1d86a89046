"""Launches the steps of a worker, each by its route, and goes on with plans for several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.worker_messages import Masks, Row, RowResult, StepPlan, StepResult, Way
from pagewire.kernels.data.deltas import AdapterRows
from pagewire.workers.batch.flat_batch import Batch, build_batch
from pagewire.workers.batch.overlay import both
from pagewire.workers.batch.slots import Slots
from pagewire.workers.caches.states import StepStates
from pagewire.workers.device.interface import Event
from pagewire.workers.device.kv_size import CacheSize
from pagewire.workers.run.environment import StepEnvironment
from pagewire.workers.run.interface import Quiet, RecordedShape, RecordedSteps
from pagewire.workers.run.kv_memory import KVMemory
from pagewire.workers.run.route import Routes
from pagewire.workers.run.step import FinishedStep, RunningStep
from pagewire.workers.step.context import StepContext

ONE_BLOCK = CacheSize(1, 1)


class StepLauncher:
    """Launches steps.

    kv: the memory in which they run. routes: which way each takes.
    graphs: the steps that are recorded; None: none is.
    """

    def __init__(self, env: StepEnvironment, kv: KVMemory, routes: Routes) -> None:
        self.env, self.kv, self.routes = env, kv, routes
        self.graphs: RecordedSteps | None = None

    # ------------------------------------------------------------ memory

    def allocate(self, size: CacheSize) -> None:
        """Take memory for numbers of KV blocks and state slots, zeroed, and run steps in it.

        Raises:
            LoadError: there is not enough.
        """
        loaded = self.env.model.current
        self.kv.allocate(loaded, size)
        self.routes.use(loaded, self.kv.caches, self.kv.states)

    @contextmanager
    def trial_memory(self) -> Iterator[None]:
        """A context with memory for one KV block and one state slot.

        Raises:
            LoadError: there is not enough.
        """
        self.allocate(ONE_BLOCK)
        try:
            yield
        finally:
            self.kv.let_go()

    def free(self) -> None:
        """Give the memory for KV blocks and states back, and forget every request."""
        self.env.slots.clear()
        self.routes.forget()
        self.env.parts.media.clear()
        self.graphs = None
        self.kv.free()

    # ------------------------------------------------------------ steps

    def run(self, plan: StepPlan, masks: Callable[[], Masks | None] = lambda: None) -> StepResult:
        """Launch, sample and finish a plan, with all of its steps. masks: see `RunningStep.sample`."""
        step = self.launch(plan)
        step.sample(masks)
        result = step.finish()
        self.go_on(step, result)
        return result

    def launch(self, plan: StepPlan, quiet: Quiet | None = None) -> RunningStep | FinishedStep:
        """Launch the model for a plan. Tokens that the previous step still samples are taken from the device.

        quiet: a plan of several steps goes on only as long as this is so; None: it is.

        Raises:
            RuntimeError: the worker sleeps: its weights are dropped, or its KV memory is given back.
        """
        env = self.env
        model = env.model.current.model
        self.kv.check_taken()
        env.slots.apply(plan, with_tokens=not model.is_last)
        encoder_begin = env.device.record_event() if plan.encodes else None
        env.parts.media.apply(plan)
        step = self._routed(plan, quiet)
        step.encoder_begin = encoder_begin
        return step

    def _routed(self, plan: StepPlan, quiet: Quiet | None) -> RunningStep | FinishedStep:
        """Launch the model for a plan that was applied, by its route."""
        route = self.routes.of(plan, self.graphs, profiled=self.env.profiler.is_on)
        if route.way is Way.ENCODING:
            return self.routes.encoding.run(plan)
        decoded = self.routes.decoding.run(plan, quiet) if route.way is Way.DECODING else None
        return decoded if isinstance(decoded, FinishedStep) else self._launch(plan, route.shape, decoded)

    def go_on(
        self, step: RunningStep | FinishedStep, result: StepResult, quiet: Quiet | None = None
    ) -> Event:
        """Add the further steps of a plan to the result of its first one; returns the end of the last.

        Each runs the rows of the one before, with the tokens that it gave. They end early where a row has failed or
        ended, or the core wants something. A row that fails later than in the first step keeps the tokens that it
        has: the next plan runs it again, and returns its error.
        """
        plan, slots = step.plan, self.env.slots
        for number in range(1, 1 + step.num_further):
            if not all(_goes_on(slots, row, own) for row, own in zip(plan.rows, result.rows, strict=True)):
                break
            if quiet is not None and not quiet.check():
                break
            rows = [Row(row.slot, row.start + number, 1, num_samples=1) for row in plan.rows]
            step = self.launch(StepPlan(plan.step_id, rows))
            step.sample(lambda: None)
            more = step.finish()
            result.busy_us += more.busy_us
            for own, added in zip(result.rows, more.rows, strict=True):
                _extend(own, added)
            if any(added.error is not None for added in more.rows):
                break
        return step.end

    def forward(self, batch: Batch, adapters: AdapterRows | None) -> Tensor:
        """Launch the model for a batch on the device, as it is recorded; returns hidden states [T, H].

        A stage before the last does not send them. adapters: the rows that have some; None: none has.
        """
        return self.env.model.current.model.own_states(*self._inputs(batch, adapters))

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, shape: RecordedShape | None, decoded: Tensor | None) -> RunningStep:
        """Launch operation by operation, or a replay of a shape. decoded: hidden states, if the model has run."""
        env = self.env
        model = env.model.current.model
        env.parts.drafter.apply(plan)
        received = model.received(sum(row.num_tokens for row in plan.rows)) if plan.rows else None
        way = Way.RECORDED if shape else Way.GENERAL
        step = RunningStep(env, plan, env.device.record_event(), way)
        if plan.rows:
            has_run = (self._batch(plan, None), decoded) if decoded is not None else None
            batch, hidden = has_run or self._run(plan, shape, received, step)
            if model.is_last:
                step.run(batch, hidden)
            else:
                step.pass_on()
        return step

    def _run(
        self, plan: StepPlan, shape: RecordedShape | None, received: Tensor | None, step: RunningStep
    ) -> tuple[Batch, Tensor]:
        """Launch the model; returns the batch on the device and its hidden states.

        shape: of a replay; None: nothing is replayed. received: see `Model.received`. step: gets the errors of
        rows.
        """
        env, graphs = self.env, self.graphs
        model, device = env.model.current.model, env.device
        batch = self._batch(plan, shape)
        if shape is not None and batch.media is not None and batch.media.axes is not None:
            shape, batch = None, self._batch(plan, None)  # tokens of a recorded step have one position each
        if batch.media is not None:
            step.errors = batch.media.errors
        if device.asynchronous:
            batch = batch.with_tensors(device.upload(batch.tensors))
        batch, adapters = replace(batch, received=received), env.parts.adapters.rows(batch.adapters)
        with env.profiler.span("model"):
            if shape is None or graphs is None:
                return batch, model.hidden_states(*self._inputs(batch, adapters))
            states = graphs.replay(shape, batch, adapters)
            if not model.is_last:
                # What is on its way must not change, and the next replay overwrites the states.
                model.send(states[: sum(row.num_tokens for row in plan.rows)].clone())
            return batch, states

    def _batch(self, plan: StepPlan, shape: RecordedShape | None) -> Batch:
        """The batch of a plan on the host, with what media do to it. shape: to which it is padded."""
        env = self.env
        batch = build_batch(plan.rows, env.slots, *(shape or ())[:2])
        model = env.model.current.model
        batch = batch.with_attention(model.laid_out(batch.attention, batch.positions))
        laid = env.parts.media.lay(plan.rows, batch.starts, batch.positions)
        return batch if laid is None else laid.on(batch, plan.rows)

    def _inputs(self, batch: Batch, adapters: AdapterRows | None) -> tuple[Tensor, StepContext]:
        """The tokens of a batch on the device, and what the layers take beside them."""
        env = self.env
        input_ids = env.relay.fill(batch.input_ids) if batch.needs_relay else batch.input_ids
        overlay, axes = batch.overlay, None
        if (laid := batch.media) is not None:
            overlay, axes, input_ids = both(overlay, laid.overlay), laid.axes, laid.ids(input_ids)
        context = StepContext(
            batch.attention,
            batch.positions,
            self.kv.caches,
            env.model.current.model.first_layer,
            adapters=adapters,
            overlay=overlay,
            axes=axes,
            token_types=batch.token_types,
            starts=batch.starts,
            received=batch.received,
            states=None if batch.states is None else StepStates(batch.states, self.kv.states),
            sources=batch.sources,
        )
        return input_ids, context


def _goes_on(slots: Slots, row: Row, result: RowResult) -> bool:
    """True if a row has neither failed nor ended."""
    return result.error is None and result.token_ids[-1] not in slots.sampling[row.slot].stop_ids


def _extend(result: RowResult, added: RowResult) -> None:
    """Add the token of a further step to the result of a row."""
    if added.error is None:
        result.token_ids.append(added.token_ids[0])
        result.logprobs = LogprobRows.join([x for x in (result.logprobs, added.logprobs) if x is not None])
