"""Loads a model from packed weights; where there are none, from its checkpoint, and then keeps them packed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cpu.memory import reserved
from pagewire.kernels.cpu.progress import compile_seconds
from pagewire.workers.device.interface import Device
from pagewire.workers.module.refusals import refusals
from pagewire.workers.network.loaded import LoadedModel, Phases
from pagewire.workers.ranks.agreement import all_have
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.single import shards_of
from pagewire.workers.weight_cache import file, folder
from pagewire.workers.weight_cache.ahead import WeightsAhead
from pagewire.workers.weight_cache.file import PackedFile
from pagewire.workers.weight_cache.forms import NotStoredError, describe, restored, stored, tensors_of
from pagewire.workers.weight_cache.key import key_of

logger = logging.getLogger("pagewire.worker")

NICENESS = 5  # of the thread that writes: requests come first


def load(ahead: WeightsAhead, phases: Phases, device: Device, collective: Collective) -> LoadedModel:
    """The model of a configuration, proven now or when its packed weights were written.

    Raises:
        LoadError: it cannot be loaded or is not supported; the text says why.
    """
    ahead.wait()
    if compile_seconds():
        phases.end("compile kernels")  # what of it was not done while torch was imported
    shards_of(collective, ahead.config.parallel)  # the first time it takes all ranks
    loaded = None if ahead.packed is None else from_packed(ahead.packed, collective, ahead.config)
    if all_have(loaded is not None, collective, device.torch_device):  # proving a model takes all ranks
        assert loaded is not None
        phases.end("packed weights")
        return loaded
    loaded = ahead.packed = None  # another rank lacks its own: these make room for those that are loaded now
    from pagewire.workers.network.loading import load_model  # a start from packed weights does without

    alone = collective.size == 1 and device.torch_device.type == "cpu"
    with reserved(ahead.reserve), refusals(ahead.config.model_path, alone=alone):
        return load_model(ahead.config, phases, device, collective)


def from_packed(packed: PackedFile, collective: Collective, config: WorkerConfig) -> LoadedModel | None:
    """The model of a file; None, and the file is removed, if it is none that this process can run.

    None, too, where adapters are served, of an encoder or a classifier: adapters change linear layers by their
    names, which a stack and a list of layers do not have.
    """
    try:
        ranks = {"all": collective, "shards": shards_of(collective, config.parallel)}
        loaded = restored(packed.header.description, tensors_of(packed), ranks)
        if not isinstance(loaded, LoadedModel):
            raise ValueError("it describes no model")
        classifies = loaded.pooler is not None and loaded.pooler.scores is not None
        return None if config.lora is not None and (loaded.model.encodes or classifies) else loaded
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        logger.warning("ignored the packed weights %s: %s", packed.header.key, error)
        folder.remove(packed.header.key)
        return None


def keep_in_background(
    loaded: LoadedModel, ahead: WeightsAhead, collective: Collective
) -> threading.Thread | None:
    """Write the packed weights of a model in a thread; None if they came from a file, or cannot be kept."""
    if ahead.key is None or ahead.packed is not None:
        return None
    try:
        tensors: list[Tensor] = []
        description = describe(loaded, tensors, collective)
    except NotStoredError as error:
        logger.debug("packed weights are not kept: %s", error)
        return None
    thread = threading.Thread(
        target=keep, args=(ahead, tensors, description), name="keep-weights", daemon=True
    )
    thread.start()
    return thread


def keep(ahead: WeightsAhead, tensors: Sequence[Tensor], description: object) -> None:
    """Write packed weights, unless the checkpoint has changed meanwhile. Where that fails, a log line says why."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    assert ahead.key is not None
    began = time.monotonic()
    try:
        if key_of(ahead.config) != ahead.key:
            logger.warning("packed weights are not kept: the checkpoint has changed since it was read")
            return
        contents = [stored(tensor) for tensor in tensors]
        size = file.size_of(contents)
        with folder.new_file(ahead.key, size) as new:
            if new is None:
                logger.info("packed weights are not kept: they are written already, or are too large")
                return
            file.write(new, ahead.key, contents, description)
    except (OSError, ValueError) as error:
        logger.warning("packed weights are not kept: %s", error)
        return
    logger.info("kept %.2f GB of packed weights in %.1f s", size / 1e9, time.monotonic() - began)
