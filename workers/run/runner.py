"""A loaded model that runs steps on a device, gives its memory back, and takes it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from torch import Tensor

from pagewire.ipc.wire.items import WeightFile
from pagewire.ipc.wire.worker_messages import Masks, Ready, StepPlan, StepResult, WorkerConfig
from pagewire.kernels.data.paging import Cache
from pagewire.workers.device.interface import Event
from pagewire.workers.device.kv_size import CacheSize
from pagewire.workers.network.loaded import LoadedModel, Phases
from pagewire.workers.network.road import road_summary
from pagewire.workers.run.interface import Quiet, RecordedSteps
from pagewire.workers.run.launch import StepLauncher
from pagewire.workers.run.step import FinishedStep, RunningStep
from pagewire.workers.run.warm_up import WarmUp
from pagewire.workers.tiers.interface import WorkerTier


class Runner:
    """A worker's model, for its process and for the operator's extension; made by `wiring.open_runner`.

    launcher: launches its steps. warm_up: runs the first ones. size: of the KV memory, which is taken.
    tier: where its KV blocks are kept on disk.

    Attributes:
        records: its steps are recorded as graphs.
        embedding_size: numbers of an embedding that may take the place of a token's; 0: none may, or `warm_up` has
            not been called.

    Raises:
        LoadError: the operator's extension cannot be made.
    """

    def __init__(
        self,
        config: WorkerConfig,
        phases: Phases,
        launcher: StepLauncher,
        warm_up: WarmUp,
        size: CacheSize,
        tier: WorkerTier,
    ) -> None:
        self.config, self.phases = config, phases
        self.launcher, self.kv, self._warm_up = launcher, launcher.kv, warm_up
        self.tier = tier
        self.num_blocks, self.num_states = self._size = size
        self.block_bytes = launcher.kv.block_bytes
        self.records = warm_up.records
        self.decoding = launcher.routes.decoding
        env = launcher.env
        self.weights, self.device, self.collective = env.model, env.device, env.collective
        self.slots, self.sampler, self.profiler = env.slots, env.sampler, env.profiler
        parts = env.parts
        self.adapters, self.media, self.drafter = parts.adapters, parts.media, parts.drafter
        self.embedding_size = 0
        self.extension = parts.extension.of(self)

    def ready(self) -> Ready:
        """The message that describes the loaded model and its memory."""
        loaded = self.model
        return Ready(
            architecture=loaded.architecture,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=self.device.name,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            num_blocks=self.num_blocks,
            bytes_per_block=self.block_bytes,
            num_states=self.num_states,
            bytes_per_state=self.kv.state_bytes,
            weight_bytes=self.weight_bytes,
            eos_token_id=loaded.eos_token_id,
            startup_seconds=dict(self.phases.seconds),
            memory=self.memory(),
            pooling=None if loaded.pooler is None else loaded.pooler.info,
            embedding_size=self.embedding_size,
            short_length=loaded.short_length,
            source=loaded.source,
            media=self.media.are_taken,
            encoder_layers=self.media.num_layers,
            tier=list(self.tier.take_reports()),
        )

    # ------------------------------------------------------------ model and memory

    @property
    def model(self) -> LoadedModel:
        """The loaded model.

        Raises:
            RuntimeError: its weights are dropped, because the worker sleeps.
        """
        return self.weights.current

    @property
    def road(self) -> str:
        """How the layers run, and on a CPU the steps that only decode, in a sentence."""
        loaded = self.model
        decodes = loaded.pooler is None and loaded.model.is_last and not self.device.asynchronous
        return road_summary(loaded.road, self.decoding.why_not if decodes else None)

    @property
    def caches(self) -> list[Cache]:
        """Of the model's layers; empty while their memory is given back."""
        return self.kv.caches

    @property
    def states(self) -> list[Tensor]:
        """Of the model's layers; empty while their memory is given back."""
        return self.kv.states

    @property
    def graphs(self) -> RecordedSteps | None:
        """The steps that are recorded; None: none is."""
        return self.launcher.graphs

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, the drafter's included; 0 while they are dropped."""
        return self.launcher.env.weight_bytes

    def memory(self) -> dict[str, int]:
        """Bytes by use: `Device.memory`, weights, kv_cache and states."""
        adapters = {"adapters": self.adapters.num_bytes} if self.adapters.are_served else {}
        return self.device.memory() | {"weights": self.weight_bytes} | self.kv.num_bytes | adapters

    # ------------------------------------------------------------ steps

    def step(self, plan: StepPlan, masks: Callable[[], Masks | None] = lambda: None) -> StepResult:
        """Launch, sample and finish a plan, with all of its steps. masks: see `RunningStep.sample`."""
        return self.launcher.run(plan, masks)

    def launch(self, plan: StepPlan, quiet: Quiet | None = None) -> RunningStep | FinishedStep:
        """Launch the model for a plan; see `StepLauncher.launch`."""
        return self.launcher.launch(plan, quiet)

    def go_on(
        self, step: RunningStep | FinishedStep, result: StepResult, quiet: Quiet | None = None
    ) -> Event:
        """Add the further steps of a plan to the result of its first one; see `StepLauncher.go_on`."""
        return self.launcher.go_on(step, result, quiet)

    @property
    def spare_work(self) -> Iterator[None]:
        """Optional work for idle moments, a millisecond or less with each `next`."""
        return self.kv.populate(self.slots.num_used_blocks)

    def load_more(self) -> bool:
        """Go on with adapters that are being loaded; see `WorkerAdapters.advance`."""
        return self.adapters.advance()

    # ------------------------------------------------------------ sleeping

    def allocate_kv(self) -> None:
        """Take memory for KV blocks and states, zeroed.

        Raises:
            LoadError: there is not enough.
        """
        self.launcher.allocate(self._size)

    def warm_up(self) -> None:
        """Do once what no request shall pay for: run a token, and record graphs. Writes nowhere that matters."""
        self.embedding_size = self._warm_up.run()

    def free(self) -> None:
        """Give the memory for KV blocks and states back, and forget every request."""
        self.launcher.free()

    def drop_weights(self) -> None:
        """Let go of all weights; the KV memory must be given back before."""
        self.weights.drop()
        self.drafter.unload()

    def use_weights(self, files: Sequence[WeightFile]) -> None:
        """Load the tensors of these files in place of the checkpoint's, the next time that weights are loaded."""
        self.config = self.weights.config = msgspec.structs.replace(self.config, weights=list(files))

    def load_weights(self) -> None:
        """Load the weights again, if they were dropped.

        Raises:
            LoadError: they cannot be loaded.
        """
        self.weights.load()
        self.drafter.load(self.model)
