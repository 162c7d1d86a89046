"""Opens the parts that a model may have: adapters, logits processors, media, a drafter, an extension, a cold tier.

Each is opened if the configuration asks for it; else something stands in for it that does nothing, so that steps
need not ask. The modules of a part are imported where it is opened: engines without it start sooner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.adapters.interface import NoAdapters, WorkerAdapters
from pagewire.workers.batch.slots import Slots
from pagewire.workers.caches.kv import memory_of
from pagewire.workers.device.interface import Device, TokenSampler
from pagewire.workers.media.interface import NoMedia, WorkerMedia
from pagewire.workers.network.loaded import LoadedModel, Phases
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.run.environment import ModelParts
from pagewire.workers.run.extension import ExtensionClass
from pagewire.workers.run.kv_memory import KVMemory
from pagewire.workers.run.processors import LogitsProcessors, open_processor
from pagewire.workers.speculation.interface import Drafter, NoDrafter
from pagewire.workers.tiers.interface import NoTier, WorkerTier

logger = logging.getLogger("pagewire.worker")


@dataclass(frozen=True)
class EarlyParts:
    """The parts that are opened before the model, as they may be refused without it."""

    adapters: WorkerAdapters
    processors: LogitsProcessors
    extension: ExtensionClass

    @classmethod
    def open(cls, config: WorkerConfig, device: Device, wake: Callable[[], None]) -> EarlyParts:
        """Open them. wake: called by other threads when adapters have messages.

        Raises:
            LoadError: one cannot be opened; the text says why.
        """
        return cls(
            open_adapters(config, device, wake),
            open_processors(config, device.torch_device),
            ExtensionClass(config.worker_extension),
        )


def open_parts(
    early: EarlyParts,
    config: WorkerConfig,
    loaded: LoadedModel,
    slots: Slots,
    phases: Phases,
    device: Device,
    sampler: TokenSampler,
    collective: Collective,
) -> ModelParts:
    """All parts of a model. slots, sampler: of the model. collective: of the ranks that run it.

    Raises:
        LoadError: one cannot be opened, or does not fit the model; the text says why.
    """
    media = open_media(config, loaded, device, slots, phases)
    drafter = drafter_for(config, loaded, slots, phases, device, sampler, collective)
    return ModelParts(early.adapters, early.extension, media, drafter)


def open_adapters(config: WorkerConfig, device: Device, wake: Callable[[], None]) -> WorkerAdapters:
    """The adapters of a worker. wake: see `EarlyParts.open`.

    Raises:
        LoadError: they cannot be served with this configuration.
    """
    if config.lora is None:
        return NoAdapters()
    from pagewire.workers.adapters.loader import Adapters

    return Adapters(config, device, wake)


def open_processors(config: WorkerConfig, device: torch.device) -> LogitsProcessors:
    """The logits processors of an engine, imported and made.

    Raises:
        LoadError: one cannot be imported or made.
    """
    return LogitsProcessors([open_processor(source, config, device) for source in config.logits_processors])


def open_media(
    config: WorkerConfig, loaded: LoadedModel, device: Device, slots: Slots, phases: Phases
) -> WorkerMedia:
    """What encodes pictures and sounds for a model; one that pools takes none.

    Raises:
        LoadError: its encoder cannot be loaded.
    """
    if not config.media or loaded.pooler is not None:
        return NoMedia()
    if loaded.model.network is None:
        logger.info("the model is served for text only: its layers run as transformers' module")
        return NoMedia()
    from pagewire.workers.media.entries import MediaEntries
    from pagewire.workers.media.tower import load_tower

    tower = load_tower(config, device)
    phases.end("encoder")
    return NoMedia() if tower is None else MediaEntries(tower, slots)


def drafter_for(
    config: WorkerConfig,
    target: LoadedModel,
    slots: Slots,
    phases: Phases,
    device: Device,
    sampler: TokenSampler,
    collective: Collective,
) -> Drafter:
    """What proposes tokens for a model in the worker; see `open_drafter`.

    Raises:
        LoadError: it cannot be loaded, does not fit the model, or is not served.
    """
    if config.speculative is None or config.speculative.in_core:
        return NoDrafter()
    from pagewire.workers.speculation.open import open_drafter

    return open_drafter(config, target, slots, phases, device, sampler, collective)


def open_tier(
    config: WorkerConfig, loaded: LoadedModel, device: Device, kv: KVMemory, wake: Callable[[], None]
) -> WorkerTier:
    """Where a worker keeps KV blocks beside its KV memory. wake: called by another thread when it has reports.

    Raises:
        LoadError: it cannot be opened, or the model's blocks cannot be kept.
    """
    if config.tier is None:
        return NoTier()
    from pagewire.workers.tiers.disk import open_disk_tier
    from pagewire.workers.tiers.memory import TierMemory

    def memory() -> TierMemory:
        return TierMemory.of_tensors(memory_of(kv.caches), kv.states)

    return open_disk_tier(config, config.tier, loaded, device, memory, wake)
