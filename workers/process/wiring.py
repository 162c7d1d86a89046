"""Makes a worker's runner: opens the device, loads the model with its parts, and takes KV memory.

Steps know their parts by interfaces alone. Which ones there are is decided here, and each is made of what it needs,
in the order in which they need each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pagewire.ipc.wire.worker_messages import Ready, WorkerConfig
from pagewire.workers.adapters.interface import WorkerAdapters
from pagewire.workers.batch.slots import Relay, Slots
from pagewire.workers.device.gpu_memory import MOST_LIKELY, max_samples
from pagewire.workers.device.interface import Device
from pagewire.workers.device.kv_size import ledger
from pagewire.workers.device.open import open_device
from pagewire.workers.network.loaded import LoadedModel, Phases
from pagewire.workers.process.open_parts import EarlyParts, open_parts, open_tier
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.single import SingleRank
from pagewire.workers.run.decoding import Decoding
from pagewire.workers.run.encoding import Encoding
from pagewire.workers.run.environment import StepEnvironment
from pagewire.workers.run.graphs import StepGraphs
from pagewire.workers.run.kv_memory import KVMemory
from pagewire.workers.run.launch import StepLauncher
from pagewire.workers.run.model import WorkerModel
from pagewire.workers.run.profiling import StepProfiler
from pagewire.workers.run.room import records_steps, size_kv
from pagewire.workers.run.route import Routes
from pagewire.workers.run.runner import Runner
from pagewire.workers.run.warm_up import WarmUp
from pagewire.workers.sample.typical import TypicalAcceptance
from pagewire.workers.weight_cache.ahead import WeightsAhead
from pagewire.workers.weight_cache.cached_loading import load

logger = logging.getLogger("pagewire.worker")


def open_runner(
    config: WorkerConfig,
    report: Callable[[str, float], None],
    ahead: WeightsAhead | None = None,
    collective: Collective | None = None,
    wake: Callable[[], None] = lambda: None,
) -> tuple[Runner, Ready]:
    """Load the model, allocate the KV cache and run a first step.

    report: called with the name and seconds of each phase of the start. ahead: reads packed weights already.
    collective: of this rank's group; default: a group of one. wake: called by other threads when adapters or the
    tier have messages.

    Raises:
        LoadError: the configuration cannot work; the text says why.
    """
    phases = Phases(report)
    launcher = open_launcher(config, phases, ahead or WeightsAhead(config), collective or SingleRank(), wake)
    record = recorder(config, launcher)
    size = size_kv(config, launcher, records=record is not None)
    launcher.allocate(size)
    tier = open_tier(config, launcher.env.model.current, launcher.env.device, launcher.kv, wake)
    runner = Runner(config, phases, launcher, WarmUp(config, launcher, record), size, tier)
    phases.end("kv")
    runner.warm_up()
    phases.end("warmup")
    logger.info("memory: %s", ledger(runner.memory()))
    logger.info("%s", runner.road)
    return runner, runner.ready()


def open_launcher(
    config: WorkerConfig,
    phases: Phases,
    ahead: WeightsAhead,
    collective: Collective,
    wake: Callable[[], None],
) -> StepLauncher:
    """What launches steps of a model, which has no KV memory yet. The arguments: see `open_runner`.

    Raises:
        LoadError: the device or the model cannot be opened; the text says why.
    """
    device = open_device(config)
    early = EarlyParts.open(config, device, wake)
    model = open_model(config, device, collective, early.adapters, ahead, phases)
    loaded = model.current
    slots = slots_of(config, loaded, early)
    sampler = device.sampler(max_samples(config), loaded.vocab_size, MOST_LIKELY)
    parts = open_parts(early, config, loaded, slots, phases, device, sampler, collective)
    env = StepEnvironment(
        model,
        parts,
        slots,
        device,
        early.processors.over(sampler),
        collective,
        TypicalAcceptance.of(config.speculative),
        Relay(config.max_num_seqs, device.torch_device),
        StepProfiler(device),
    )
    kv = KVMemory(loaded, config.block_size, device, parts.drafter)
    decoding = Decoding(config, device, slots, parts.media)
    return StepLauncher(env, kv, Routes(decoding, Encoding(device, slots), slots, parts.adapters))


def open_model(
    config: WorkerConfig,
    device: Device,
    collective: Collective,
    adapters: WorkerAdapters,
    ahead: WeightsAhead,
    phases: Phases,
) -> WorkerModel:
    """The model, loaded. Whenever it is loaded, it is made to ask for the adapters.

    Raises:
        LoadError: it cannot be loaded, or cannot have the adapters.
    """

    def loaded(ahead: WeightsAhead, phases: Phases) -> LoadedModel:
        model = load(ahead, phases, device, collective)
        adapters.attach(model, collective)
        return model

    def again(config: WorkerConfig) -> LoadedModel:
        return loaded(WeightsAhead(config), Phases(lambda phase, seconds: None))

    return WorkerModel(loaded(ahead, phases), again, config)


def slots_of(config: WorkerConfig, loaded: LoadedModel, parts: EarlyParts) -> Slots:
    """The slots of a worker's sequences."""
    return Slots(
        config.max_num_seqs,
        loaded.max_model_len,
        config.block_size,
        loaded.vocab_size,
        num_extra_tokens=parts.adapters.num_extra_tokens,
        short_length=loaded.short_length,
        with_histories=parts.processors.for_all,
        source_info=loaded.source,
    )


def recorder(config: WorkerConfig, launcher: StepLauncher) -> Callable[[], StepGraphs | None] | None:
    """Records the steps of the loaded model as graphs; None if they are not to be, see `records_steps`."""
    if not records_steps(config, launcher):
        return None
    env = launcher.env
    return lambda: StepGraphs.recorded(
        config, env.device, env.model.current, launcher.forward, env.parts.adapters
    )
