"""The room that the weights and the largest steps of a worker leave: for the KV cache, and for graphs."""

from __future__ import annotations

import logging

import torch

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.device.gpu_memory import MOST_LIKELY, may_record
from pagewire.workers.device.interface import Device, LoadedSizes
from pagewire.workers.device.kv_size import CacheSize, cache_size
from pagewire.workers.errors import LoadError
from pagewire.workers.run.decoding import MODULE_LAYERS
from pagewire.workers.run.graphs import padding_for
from pagewire.workers.run.interface import RecordedShape
from pagewire.workers.run.launch import StepLauncher
from pagewire.workers.run.trial_steps import TrialSteps

logger = logging.getLogger("pagewire.worker")


def size_kv(config: WorkerConfig, launcher: StepLauncher, *, records: bool) -> CacheSize:
    """The numbers of KV blocks and state slots, by what the largest steps leave of the device's memory.

    records: steps will be recorded as graphs.

    Raises:
        LoadError: there is not enough memory. On a GPU the text says what takes it.
    """
    env, kv = launcher.env, launcher.kv
    device, loaded = env.device, env.model.current
    sizes = LoadedSizes(loaded.vocab_size, env.weight_bytes, records)
    if loaded.model.encodes:  # a block of the core stands for a prompt
        if device.asynchronous and device.kv_budget(config, sizes, lambda: run_widest(config, launcher)) <= 0:
            raise LoadError(
                f"steps of {config.max_num_batched_tokens} tokens (max_num_batched_tokens) do not fit into the "
                f"memory of {device.name} beside the weights. {shortage(device)}"
            )
        return CacheSize(config.max_num_seqs, 0)
    left = device.kv_budget(config, sizes, lambda: run_widest(config, launcher))
    left -= env.parts.drafter.spare_bytes
    try:
        return cache_size(config, loaded.max_model_len, kv.block_bytes, kv.state_bytes, left)
    except LoadError as error:
        if device.plan is None:
            raise
        raise LoadError(f"{error}. {shortage(device)}") from None


def shortage(device: Device) -> str:
    """What takes the memory of a GPU; empty before it is shared out."""
    return "" if device.plan is None else device.plan.shortage(device.name)


def run_widest(config: WorkerConfig, launcher: StepLauncher) -> None:
    """Run the largest steps, with KV memory for one block and one state slot."""
    with launcher.trial_memory():
        TrialSteps(launcher.run, config, launcher.env.model.current).run_widest(MOST_LIKELY)


def records_steps(config: WorkerConfig, launcher: StepLauncher) -> bool:
    """True if a worker records steps as graphs: its options allow it, and its model never waits for the device.

    The log says why a model is not recorded that could be.
    """
    device, loaded = launcher.env.device, launcher.env.model.current
    if not may_record(config) or not device.can_record(loaded.dtype):
        return False
    # Encoders and what they encode come as they come.
    if loaded.model.encodes or loaded.source is not None:
        return False
    if (reason := why_not_recorded(config, launcher)) is not None:
        logger.info("steps are launched kernel by kernel: %s", reason)
    return reason is None


def why_not_recorded(config: WorkerConfig, launcher: StepLauncher) -> str | None:
    """Why the steps of a model cannot be recorded; None if they can. It has no KV memory then."""
    device = launcher.env.device
    if launcher.env.model.current.model.network is None:
        return MODULE_LAYERS
    with launcher.trial_memory():
        batch = padding_for(launcher.env.model.current, RecordedShape(1, 1, 1), 1, config.block_size, device)
        with torch.inference_mode():
            reason = device.why_it_waits(lambda: launcher.forward(batch, None))
            if reason is None and (recorded := launcher.env.parts.adapters.recorded_rows(1)) is not None:
                rows = recorded.first(1)
                reason = device.why_it_waits(lambda: launcher.forward(batch, rows))
    return None if reason is None else f"the model waits for the device: {reason}"
