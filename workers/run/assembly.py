"""Builds what a runner is made of, each part of what it needs, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.batch.slots import Relay, Slots
from pagewire.workers.device.gpu_memory import MOST_LIKELY, max_samples
from pagewire.workers.device.kv_size import CacheSize
from pagewire.workers.device.open import open_device
from pagewire.workers.network.loaded import LoadedModel, Phases
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.run.environment import StepEnvironment
from pagewire.workers.run.kv_memory import KVMemory
from pagewire.workers.run.launch import StepLauncher
from pagewire.workers.run.model import WorkerModel
from pagewire.workers.run.parts import EarlyParts, ModelParts
from pagewire.workers.run.profiling import StepProfiler
from pagewire.workers.run.room import records_steps, size_kv
from pagewire.workers.run.route import Routes
from pagewire.workers.run.warm_up import WarmUp
from pagewire.workers.sample.typical import TypicalAcceptance
from pagewire.workers.weight_cache.ahead import WeightsAhead


class Assembly(NamedTuple):
    """What a runner is made of.

    size: of the KV memory, which is taken.
    """

    launcher: StepLauncher
    warm_up: WarmUp
    size: CacheSize


def assemble(
    config: WorkerConfig,
    phases: Phases,
    ahead: WeightsAhead,
    collective: Collective,
    wake: Callable[[], None],
) -> Assembly:
    """Open the device, load the model with its parts, and take KV memory.

    ahead: reads packed weights already. collective: of this rank's group.
    wake: called by other threads when adapters have messages.

    Raises:
        LoadError: the configuration cannot work; the text says why.
    """
    device = open_device(config)
    early = EarlyParts.open(config, device, wake)
    model = WorkerModel(config, device, collective, early.adapters, ahead, phases)
    loaded = model.current
    slots = slots_of(config, loaded, early)
    sampler = device.sampler(max_samples(config), loaded.vocab_size, MOST_LIKELY)
    parts = ModelParts.of(early, config, loaded, slots, phases, device, sampler, collective)
    env = StepEnvironment(
        model,
        parts,
        slots,
        device,
        sampler,
        collective,
        TypicalAcceptance.of(config.speculative),
        Relay(config.max_num_seqs, device.torch_device),
        StepProfiler(device),
    )
    kv = KVMemory(loaded, config.block_size, device, parts.drafter)
    launcher = StepLauncher(env, kv, Routes.open(config, device, slots, parts))
    records = records_steps(config, launcher)
    size = size_kv(config, launcher, records=records)
    launcher.allocate(size)
    return Assembly(launcher, WarmUp(config, launcher, records=records), size)


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
