"""Steps of an encoder, in one call of the compiled kernels: from the plan's prompts to the states that are pooled.

It takes plans of whole prompts of tokens, without adapters, of a model that is one compiled stack behind tables
of embeddings. All others go the way of `Runner.launch` and `RunningStep`, which is the reference: the bits are
the same.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from pagewire.ipc.wire.worker_messages import RowResult, StepPlan, StepResult
from pagewire.kernels.cpu.encode import CompiledEncoder, EncoderParts
from pagewire.kernels.cpu.stack import CompiledStack
from pagewire.kernels.data.weight import Weight
from pagewire.workers.batch.slots import Slots
from pagewire.workers.caches.kv import PAGE
from pagewire.workers.device.interface import Device
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.network import Network
from pagewire.workers.run.decoding import rows_of
from pagewire.workers.run.pooling import PooledRow, pool_rows
from pagewire.workers.run.step import FinishedStep


class ModelToEncode(Protocol):
    """The part of a runner that encoding needs."""

    device: Device
    slots: Slots
    loaded: LoadedModel | None
    profile: Any

    @property
    def model(self) -> LoadedModel:
        """The loaded model."""


class Encoding:
    """Runs the plans of a runner that it takes."""

    def __init__(self, runner: ModelToEncode) -> None:
        self._runner = runner
        self._of: object = None
        self._encoder: CompiledEncoder | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> FinishedStep | None:
        """Run a plan that was applied to the slots; None if it is for the other way."""
        rows, slots = plan.rows, self._runner.slots
        if not rows or not all(row.pool and not row.media for row in rows):
            return None
        encoder = self._current()
        about = np.array([[row.slot for row in rows], [row.num_tokens for row in rows]], np.int64)
        if encoder is None or slots.adapters[about[0]].any():
            return None
        begin = self._runner.device.record_event()
        pooling = [slots.pooling[row.slot] for row in rows]
        seconds = [
            slot.task.second_segment or row.num_tokens for slot, row in zip(pooling, rows, strict=True)
        ]
        hidden = encoder(about[0], about[1], np.array(seconds, np.int64))
        firsts = about[1].cumsum() - about[1]
        pooled = [
            PooledRow(index, row, slot, first)
            for index, (row, slot, first) in enumerate(zip(rows, pooling, firsts.tolist(), strict=True))
        ]
        result, pooler = StepResult(plan.step_id, [RowResult() for _ in rows]), self._runner.model.pooler
        assert pooler is not None, "rows to pool are of a model that pools"
        pool_rows(pooler, pooled, hidden, slots, result)
        return FinishedStep(plan, result, begin, self._runner.device.record_event())

    def forget(self) -> None:
        """Let go of the model."""
        self._of = self._encoder = None

    def _current(self) -> CompiledEncoder | None:
        """The encoder of the model; None if the model has none, or a profiler looks on."""
        runner = self._runner
        if runner.profile is not None:
            return None
        if self._of is not runner.loaded:
            self._of, self._encoder = runner.loaded, open_encoder(runner)
        return self._encoder


def open_encoder(runner: ModelToEncode) -> CompiledEncoder | None:
    """The encoder of a runner's model; None if it has none."""
    model = runner.model.model
    network = model.base
    if runner.device.asynchronous or not model.encodes or not isinstance(network, Network):
        return None
    if runner.slots.short_length:
        return None  # positions of long prompts are others
    embedding, compiled = network.embedding, network.stack.compiled
    if embedding is None or not isinstance(compiled, CompiledStack) or not network.is_last:
        return None
    shapes = [place.shape for place in network.places if place is not None]
    tables: dict[str, Weight | None] = {}
    for name in ("words", "token_types", "positions"):
        module = getattr(embedding, name)
        tables[name] = rows_of(module)
        if module is not None and tables[name] is None:
            return None
    words = tables["words"]
    assert words is not None, "an embedding has words"
    parts = EncoderParts(
        words,
        tables["token_types"],
        tables["positions"],
        embedding.norm,
        network.angles,
        compiled,
        lambda num_pages: [model.pages.of(shape, num_pages, runner.device.torch_device) for shape in shapes],
        PAGE,
        model.first_position,
    )
    return CompiledEncoder.of(parts, runner.slots.tokens)
