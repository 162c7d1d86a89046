"""The room that the weights and the largest steps of a worker leave: for the KV cache, and for graphs."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from pagewire.ipc.wire.worker_messages import StepPlan, StepResult, WorkerConfig
from pagewire.kernels.data.deltas import AdapterRows
from pagewire.workers.adapters.interface import WorkerAdapters
from pagewire.workers.batch.flat_batch import Batch
from pagewire.workers.device.gpu_memory import MOST_LIKELY, may_record
from pagewire.workers.device.interface import Device, LoadedSizes
from pagewire.workers.device.kv_size import CacheSize, cache_size
from pagewire.workers.errors import LoadError
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.run.graphs import RecordedShape, padding_for
from pagewire.workers.run.kv_memory import KVMemory
from pagewire.workers.run.trial_steps import TrialSteps
from pagewire.workers.speculation.interface import Drafter

logger = logging.getLogger("pagewire.worker")


class SizedWorker(Protocol):
    """The part of a `Runner` whose KV cache is sized."""

    config: WorkerConfig
    device: Device
    drafter: Drafter
    kv: KVMemory
    records: bool
    adapters: WorkerAdapters

    @property
    def model(self) -> LoadedModel: ...

    @property
    def weight_bytes(self) -> int: ...

    def allocate(self, size: CacheSize) -> None: ...

    def step(self, plan: StepPlan) -> StepResult: ...

    def forward(self, batch: Batch, adapters: AdapterRows | None) -> Tensor: ...


def size_kv(runner: SizedWorker) -> CacheSize:
    """The numbers of KV blocks and state slots, by what the largest steps leave of the device's memory.

    Raises:
        LoadError: there is not enough memory. On a GPU the text says what takes it.
    """
    config, device, loaded = runner.config, runner.device, runner.model
    sizes = LoadedSizes(loaded.vocab_size, runner.weight_bytes, runner.records)
    if loaded.model.encodes:  # a block of the core stands for a prompt
        if device.asynchronous and device.kv_budget(config, sizes, lambda: run_widest(runner)) <= 0:
            raise LoadError(
                f"steps of {config.max_num_batched_tokens} tokens (max_num_batched_tokens) do not fit into the "
                f"memory of {device.name} beside the weights. {shortage(runner)}"
            )
        return CacheSize(config.max_num_seqs, 0)
    left = device.kv_budget(config, sizes, lambda: run_widest(runner)) - runner.drafter.spare_bytes
    try:
        return cache_size(config, loaded.max_model_len, runner.kv.block_bytes, runner.kv.state_bytes, left)
    except LoadError as error:
        if device.plan is None:
            raise
        raise LoadError(f"{error}. {shortage(runner)}") from None


def shortage(runner: SizedWorker) -> str:
    """What takes the memory of a worker's GPU; empty before it is shared out."""
    device = runner.device
    return "" if device.plan is None else device.plan.shortage(device.name)


def run_widest(runner: SizedWorker) -> None:
    """Run the largest steps, with KV memory for one block and one state slot."""
    runner.allocate(CacheSize(1, 1))
    TrialSteps(runner.step, runner.config, runner.model).run_widest(MOST_LIKELY)
    runner.kv.let_go()


def records_steps(runner: SizedWorker) -> bool:
    """True if a worker records steps as graphs: its options allow it, and its model never waits for the device.

    The log says why a model is not recorded that could be.
    """
    config, loaded = runner.config, runner.model
    if not may_record(config) or not runner.device.can_record(loaded.dtype):
        return False
    # Encoders and what they encode come as they come.
    if loaded.model.encodes or loaded.source is not None:
        return False
    runner.allocate(CacheSize(1, 1))
    batch = padding_for(loaded, RecordedShape(1, 1, 1), 1, config.block_size, runner.device)
    with torch.inference_mode():
        reason = runner.device.why_it_waits(lambda: runner.forward(batch, None))
        if reason is None and (recorded := runner.adapters.recorded_rows(1)) is not None:
            rows = recorded.first(1)
            reason = runner.device.why_it_waits(lambda: runner.forward(batch, rows))
    runner.kv.let_go()
    if reason is not None:
        logger.info("steps are launched kernel by kernel: the model waits for the device: %s", reason)
    return reason is None
