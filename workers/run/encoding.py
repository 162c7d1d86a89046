"""Steps of an encoder, in one call of the compiled kernels: from the plan's prompts to the states that are pooled.

It takes plans of whole prompts of tokens, without adapters, of a model that is one compiled stack behind tables
of embeddings (`route.py` has the other ways).
"""

from __future__ import annotations

import numpy as np
import torch

from pagewire.ipc.wire.worker_messages import RowResult, StepPlan, StepResult, Way
from pagewire.kernels.cpu.encode import CompiledEncoder, EncoderParts
from pagewire.kernels.cpu.stack import CompiledStack
from pagewire.kernels.data.weight import Weight
from pagewire.workers.batch.slots import Slots
from pagewire.workers.caches.kv import PAGE
from pagewire.workers.device.interface import Device
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.model import Model
from pagewire.workers.network.pooler import Pooler
from pagewire.workers.run.decoding import MODULE_LAYERS, rows_of
from pagewire.workers.run.pooling import PooledRow, pool_rows
from pagewire.workers.run.step import FinishedStep


class Encoding:
    """Runs plans of a model."""

    def __init__(self, device: Device, slots: Slots) -> None:
        self._device, self._slots = device, slots
        self._encoder: CompiledEncoder | str = "no model is loaded"
        self._pooler: Pooler | None = None

    def use(self, loaded: LoadedModel) -> None:
        """Encode with this model from now on."""
        self._encoder, self._pooler = open_encoder(self._device, self._slots, loaded.model), loaded.pooler

    def refusal(self, plan: StepPlan) -> str:
        """Why it does not take a plan that was applied to the slots; empty: it does."""
        if isinstance(self._encoder, str):
            return self._encoder
        if not all(row.pool and not row.media for row in plan.rows):
            return "a row is other than a prompt of tokens"
        if any(self._slots.adapters[row.slot] for row in plan.rows):
            return "a prompt has an adapter"
        return ""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> FinishedStep:
        """Run a plan that it does not refuse."""
        rows, slots, encoder = plan.rows, self._slots, self._encoder
        assert not isinstance(encoder, str), encoder
        about = np.array([[row.slot for row in rows], [row.num_tokens for row in rows]], np.int64)
        begin = self._device.record_event()
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
        result = StepResult(plan.step_id, [RowResult() for _ in rows], way=Way.ENCODING)
        assert self._pooler is not None, "rows to pool are of a model that pools"
        pool_rows(self._pooler, pooled, hidden, slots, result)
        return FinishedStep(plan, result, begin, self._device.record_event())

    def forget(self) -> None:
        """Let go of the model."""
        self._encoder, self._pooler = "no model is loaded", None


def open_encoder(device: Device, slots: Slots, model: Model) -> CompiledEncoder | str:
    """The encoder of a model, or why it has none."""
    network = model.network
    if device.asynchronous:
        return "steps are not recorded on this device"
    if not model.encodes:
        return "the model does not encode"
    if network is None:
        return MODULE_LAYERS
    if slots.short_length:
        return "positions of long prompts are others"
    embedding, compiled = network.embedding, network.stack.compiled
    if embedding is None or not isinstance(compiled, CompiledStack) or not network.is_last:
        return "the layers have no compiled stack"
    shapes = [place.shape for place in network.places if place is not None]
    tables: dict[str, Weight | None] = {}
    for name in ("words", "token_types", "positions"):
        module = getattr(embedding, name)
        tables[name] = rows_of(module)
        if module is not None and tables[name] is None:
            return "a token begins with more than rows of tables"
    words = tables["words"]
    assert words is not None, "an embedding has words"
    parts = EncoderParts(
        words,
        tables["token_types"],
        tables["positions"],
        embedding.norm,
        network.angles,
        compiled,
        lambda num_pages: [model.pages.of(shape, num_pages, device.torch_device) for shape in shapes],
        PAGE,
        model.first_position,
    )
    return CompiledEncoder.of(parts, slots.tokens) or "layers and tables are not of one kind"
