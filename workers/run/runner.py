"""Owns model, KV cache and slots, and runs steps on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.ipc.wire.worker_messages import Masks, Ready, StepPlan, StepResult, Way, WorkerConfig
from pagewire.kernels.data.deltas import AdapterRows
from pagewire.kernels.data.paging import Cache
from pagewire.workers.adapters.interface import WorkerAdapters
from pagewire.workers.batch.flat_batch import Batch, build_batch
from pagewire.workers.batch.slots import Relay, Slots
from pagewire.workers.caches.states import StepStates
from pagewire.workers.device.gpu_memory import MOST_LIKELY, max_samples
from pagewire.workers.device.interface import PendingTokens
from pagewire.workers.device.kv_size import CacheSize, ledger
from pagewire.workers.device.open import open_device
from pagewire.workers.module.overlay import both
from pagewire.workers.network.loaded import LoadedModel, Phases
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.single import SingleRank
from pagewire.workers.run.decoding import Decoding, Quiet
from pagewire.workers.run.encoding import Encoding
from pagewire.workers.run.extension import WorkerExtension
from pagewire.workers.run.graphs import RecordedShape, StepGraphs
from pagewire.workers.run.kv_memory import KVMemory
from pagewire.workers.run.launch import go_on
from pagewire.workers.run.model import WorkerModel
from pagewire.workers.run.parts import adapters_of, drafter_of, media_of, processors_of
from pagewire.workers.run.processors import LogitsProcessors
from pagewire.workers.run.profiling import StepProfiler
from pagewire.workers.run.room import records_steps, size_kv
from pagewire.workers.run.route import Routes
from pagewire.workers.run.step import FinishedStep, RunningStep
from pagewire.workers.run.trial_steps import GREEDY, TrialSteps, of_first_stage
from pagewire.workers.sample.typical import TypicalAcceptance
from pagewire.workers.step.context import StepContext
from pagewire.workers.weight_cache.ahead import WeightsAhead

logger = logging.getLogger("pagewire.worker")


def slots_of(
    config: WorkerConfig, loaded: LoadedModel, adapters: WorkerAdapters, processors: LogitsProcessors
) -> Slots:
    """The slots of a worker's sequences."""
    return Slots(
        config.max_num_seqs,
        loaded.max_model_len,
        config.block_size,
        loaded.vocab_size,
        num_extra_tokens=adapters.num_extra_tokens,
        short_length=loaded.short_length,
        with_histories=processors.for_all,
        source_info=loaded.source,
    )


def described(runner: Runner) -> Ready:
    """The message that describes a worker's model and its memory."""
    loaded = runner.model
    return Ready(
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=runner.device.name,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        num_blocks=runner.num_blocks,
        bytes_per_block=runner.block_bytes,
        num_states=runner.num_states,
        bytes_per_state=runner.kv.state_bytes,
        weight_bytes=runner.weight_bytes,
        eos_token_id=loaded.eos_token_id,
        startup_seconds=dict(runner.phases.seconds),
        memory=runner.memory(),
        pooling=None if loaded.pooler is None else loaded.pooler.info,
        embedding_size=runner.embedding_size,
        short_length=loaded.short_length,
        source=loaded.source,
        media=runner.media.are_taken,
    )


class Runner:
    """A loaded model with its KV cache, states and slots.

    collective: the operations of this rank with the others of its group.
    wake: called by other threads when `adapters` has messages.
    drafter: proposes tokens. typical: accepts proposed tokens that were not drawn; None: none is accepted.
    records: its steps are recorded as graphs.
    embedding_size: numbers of an embedding that may take the place of a token's; 0: none may.
    """

    def __init__(
        self,
        config: WorkerConfig,
        phases: Phases,
        ahead: WeightsAhead,
        collective: Collective,
        wake: Callable[[], None],
    ) -> None:
        self.config, self.phases, self.collective = config, phases, collective
        self.device = open_device(config)
        self.adapters = adapters_of(config, self.device, wake)
        self.processors = processors_of(config, self.device.torch_device)
        self.weights = WorkerModel(config, self.device, collective, self.adapters, ahead, phases)
        self.slots = slots_of(config, self.model, self.adapters, self.processors)
        self.sampler = self.device.sampler(max_samples(config), self.model.vocab_size, MOST_LIKELY)
        self.media = media_of(config, self.model, self.device, self.slots, phases)
        self.drafter = drafter_of(
            config, self.model, self.slots, phases, self.device, self.sampler, collective
        )
        self.kv = KVMemory(self.model, config.block_size, self.device, self.drafter)
        self.block_bytes = self.kv.block_bytes
        self.typical = TypicalAcceptance.of(config.speculative)
        self.relay = Relay(config.max_num_seqs, self.device.torch_device)
        self.graphs: StepGraphs | None = None
        self.profiler = StepProfiler(self.device)
        self.decoding = Decoding(config, self.device, self.slots, self.media)
        self.encoding = Encoding(self.device, self.slots)
        self.routes = Routes(self.decoding, self.encoding, self.slots, self.adapters)
        self.embedding_size = 0
        self.records = records_steps(self)
        self.num_blocks, self.num_states = size_kv(self)
        self.allocate_kv()
        self.extension = WorkerExtension(config.worker_extension, self)

    @classmethod
    def start(
        cls,
        config: WorkerConfig,
        report: Callable[[str, float], None],
        ahead: WeightsAhead | None = None,
        collective: Collective | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> tuple[Runner, Ready]:
        """Load the model, allocate the KV cache and run a first step.

        report: called with the name and seconds of each phase of the start. ahead: reads packed weights already.
        collective: of this rank's group; default: a group of one. wake: see `Runner`.

        Raises:
            LoadError: the configuration cannot work; the text says why.
        """
        phases = Phases(report)
        runner = cls(config, phases, ahead or WeightsAhead(config), collective or SingleRank(), wake)
        phases.end("kv")
        runner.warm_up()
        phases.end("warmup")
        logger.info("memory: %s", ledger(runner.memory()))
        return runner, runner.ready()

    def ready(self) -> Ready:
        """The message that describes the loaded model and its memory."""
        return described(self)

    @property
    def model(self) -> LoadedModel:
        """The loaded model.

        Raises:
            RuntimeError: its weights are dropped, because the worker sleeps.
        """
        return self.weights.current

    @property
    def caches(self) -> list[Cache]:
        """Of the model's layers; empty while their memory is given back."""
        return self.kv.caches

    @property
    def states(self) -> list[Tensor]:
        """Of the model's layers; empty while their memory is given back."""
        return self.kv.states

    @property
    def spare_work(self) -> Iterator[None]:
        """Optional work for idle moments, a few milliseconds with each `next`."""
        return self.kv.spare_work

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, the drafter's included; 0 while they are dropped."""
        return self.weights.weight_bytes + self.drafter.weight_bytes

    def memory(self) -> dict[str, int]:
        """Bytes by use: `Device.memory`, weights, kv_cache and states."""
        adapters = {"adapters": self.adapters.num_bytes} if self.adapters.are_served else {}
        return self.device.memory() | {"weights": self.weight_bytes} | self.kv.num_bytes | adapters

    def load_more(self) -> bool:
        """Go on with adapters that are being loaded; see `Adapters.advance`."""
        return self.adapters.advance()

    def step(self, plan: StepPlan, masks: Callable[[], Masks | None] = lambda: None) -> StepResult:
        """Launch, sample and finish a plan, with all of its steps. masks: see `RunningStep.sample`."""
        step = self.launch(plan)
        step.sample(masks)
        result = step.finish()
        go_on(self, step, result)
        return result

    def launch(self, plan: StepPlan, quiet: Quiet | None = None) -> RunningStep | FinishedStep:
        """Launch the model for a plan. Tokens that the previous step still samples are taken from the device.

        quiet: a plan of several steps goes on only as long as this is so; None: it is.
        """
        model = self.model.model
        self.slots.apply(plan, with_tokens=not model.is_last)
        self.media.apply(plan)
        route = self.routes.of(plan, self.graphs, profiled=self.profiler.is_on)
        if route.way is Way.ENCODING:
            return self.encoding.run(plan)
        decoded = self.decoding.run(plan, quiet) if route.way is Way.DECODING else None
        return decoded if isinstance(decoded, FinishedStep) else self._launch(plan, route.shape, decoded)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, shape: RecordedShape | None, decoded: Tensor | None) -> RunningStep:
        """Launch operation by operation, or a replay of a shape. decoded: hidden states, if the model has run."""
        model = self.model.model
        self.drafter.apply(plan)
        received = model.received(sum(row.num_tokens for row in plan.rows)) if plan.rows else None
        step = RunningStep(self, plan, self.device.record_event(), Way.RECORDED if shape else Way.GENERAL)
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
        model, graphs = self.model.model, self.graphs
        batch = self._batch(plan, shape)
        if shape is not None and batch.media is not None and batch.media.axes is not None:
            shape, batch = None, self._batch(plan, None)  # tokens of a recorded step have one position each
        if batch.media is not None:
            step.errors = batch.media.errors
        if self.device.asynchronous:
            batch = batch.with_tensors(self.device.upload(batch.tensors))
        batch, adapters = replace(batch, received=received), self.adapters.rows(batch.adapters)
        with self.profiler.span("model"):
            if shape is None or graphs is None:
                return batch, model.hidden_states(*self._inputs(batch, adapters))
            states = graphs.replay(shape, batch, adapters)
            if not model.is_last:
                # What is on its way must not change, and the next replay overwrites the states.
                model.send(states[: sum(row.num_tokens for row in plan.rows)].clone())
            return batch, states

    def _batch(self, plan: StepPlan, shape: RecordedShape | None) -> Batch:
        """The batch of a plan on the host, with what media do to it. shape: to which it is padded."""
        batch = build_batch(plan.rows, self.slots, *(shape or ())[:2])
        batch = batch.with_attention(self.model.model.laid_out(batch.attention, batch.positions))
        laid = self.media.lay(plan.rows, batch.starts, batch.positions)
        return batch if laid is None else laid.on(batch, plan.rows)

    def forward(self, batch: Batch, adapters: AdapterRows | None) -> Tensor:
        """Launch the model for a batch on the device, as it is recorded; returns hidden states [T, H].

        A stage before the last does not send them. adapters: the rows that have some; None: none has.
        """
        return self.model.model.own_states(*self._inputs(batch, adapters))

    def _inputs(self, batch: Batch, adapters: AdapterRows | None) -> tuple[Tensor, StepContext]:
        """The tokens of a batch on the device, and what the layers take beside them."""
        input_ids = self.relay.fill(batch.input_ids) if batch.needs_relay else batch.input_ids
        overlay, axes = batch.overlay, None
        if (laid := batch.media) is not None:
            overlay, axes, input_ids = both(overlay, laid.overlay), laid.axes, laid.ids(input_ids)
        context = StepContext(
            batch.attention,
            batch.positions,
            self.kv.caches,
            self.model.model.first_layer,
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

    def keep_tokens(self, slots: Tensor, sampled: PendingTokens) -> None:
        """Keep sampled tokens on the device for the next step, which may start before the host has read them."""
        if self.device.asynchronous:
            self.relay.keep(slots, sampled.token_ids.to(self.device.torch_device))

    def allocate_kv(self) -> None:
        """Take memory for KV blocks and states, zeroed.

        Raises:
            LoadError: there is not enough.
        """
        self.allocate(CacheSize(self.num_blocks, self.num_states))
        self.kv.populate()

    def warm_up(self) -> None:
        """Do once what no request shall pay for: run a token, and record graphs. Writes nowhere that matters."""
        trials = TrialSteps(self.step, self.config, self.model)
        trials.run([1], GREEDY)
        # The first stage has the embedding. All ranks of a group try together whether others are taken.
        size = of_first_stage(self.model.model.embedding_size, self.collective, self.device)
        size = size if size and trials.take_embeddings(size) else 0
        self.embedding_size = of_first_stage(size, self.collective, self.device)
        if self.records:
            self.graphs = StepGraphs.recorded(
                self.config, self.device, self.model, self.forward, self.adapters
            )
        self.kv.zero_first_block()

    def free(self) -> None:
        """Give the memory for KV blocks and states back, and forget every request."""
        self.slots.clear()
        self.decoding.forget()
        self.encoding.forget()
        self.media.clear()
        self.graphs = None
        self.kv.free()

    def drop_weights(self) -> None:
        """Let go of all weights; the KV memory must be given back before."""
        self.weights.drop()
        self.drafter.unload()

    def load_weights(self) -> None:
        """Load the weights again, if they were dropped.

        Raises:
            LoadError: they cannot be loaded.
        """
        self.weights.load()
        self.drafter.load(self.model)

    def allocate(self, size: CacheSize) -> None:
        """Take memory for numbers of KV blocks and state slots, zeroed.

        Raises:
            LoadError: there is not enough.
        """
        self.kv.allocate(self.model, size)
        self.decoding.use(self.model, self.kv.caches, self.kv.states)
        self.encoding.use(self.model)
