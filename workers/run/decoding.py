"""Steps that only decode, in one call of the compiled kernels: from the plan's rows to their tokens.

It takes plans in which each row runs one token and samples the next one, without drafts, masks, adapters and media,
and whose logits are changed by penalties and min_tokens alone; of a model that is one compiled stack between a
table of embeddings and an output layer. All others go the way of `Runner.launch` and `RunningStep`, which is the
reference: the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.ipc.wire.worker_messages import Row, RowResult, StepPlan, StepResult, WorkerConfig
from pagewire.kernels.cpu.decode import CompiledDecoder, DecoderParts, SequenceArrays
from pagewire.kernels.cpu.drawing import parameters
from pagewire.kernels.cpu.stack import CompiledStack
from pagewire.kernels.data.paging import Cache
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.kernels.output import CappedOutput
from pagewire.workers.batch.slots import Slots
from pagewire.workers.device.interface import Device
from pagewire.workers.module.transforms import QuantisedEmbedding, ScaledEmbedding
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.module_base import ModuleHead
from pagewire.workers.network.network import Network
from pagewire.workers.run.step import FinishedStep
from pagewire.workers.sample.sampler import SamplingSlot

if TYPE_CHECKING:
    from pagewire.workers.media.entries import MediaEntries


class ModelToDecode(Protocol):
    """The part of a runner that decoding needs."""

    config: WorkerConfig
    device: Device
    slots: Slots
    loaded: LoadedModel | None
    caches: list[Cache]
    media: MediaEntries | None
    profile: Any

    @property
    def model(self) -> LoadedModel:
        """The loaded model."""


@dataclass(frozen=True)
class Quiet:
    """Whether the core wants nothing.

    check: true if it does not. descriptors: at most two files; one can be read once it does, if check was called.
    """

    check: Callable[[], bool]
    descriptors: Sequence[int]


class KnownSlot(NamedTuple):
    """A slot's sequence as the decoder has it. is_plain: it can be taken. ends: memory that the decoder reads."""

    sequence: SamplingSlot
    is_plain: bool
    ends: NDArray[np.int64]


class Decoding:
    """Runs the plans of a runner that it takes."""

    def __init__(self, runner: ModelToDecode) -> None:
        self._runner = runner
        self._of: tuple[object, object] = (None, None)
        self._decoder: CompiledDecoder | None = None
        self._known: dict[int, KnownSlot] = {}

    def run(self, plan: StepPlan, quiet: Quiet | None) -> FinishedStep | None:
        """Run a plan that was applied to the slots; None if it is for the other way. quiet: None: it stays so."""
        rows, slots = plan.rows, self._runner.slots
        if not rows or plan.masked or not all(map(decodes, rows)):
            return None
        decoder = self._current()
        if decoder is None or not all(self._takes(decoder, row) for row in rows):
            return None
        begin = self._runner.device.record_event()
        num_steps = plan.num_steps if quiet is None or quiet.check() else 1
        about = np.array([[row.slot for row in rows], [row.start for row in rows]], np.int64)
        descriptors = np.array([] if quiet is None else quiet.descriptors, np.int32)
        chosen = decoder(about[0], about[1], num_steps, descriptors)
        if not len(chosen):
            return None
        result = StepResult(plan.step_id, [RowResult(tokens) for tokens in chosen.T.tolist()])
        for row, own in zip(rows, result.rows, strict=True):
            sequence = slots.sampling[row.slot]
            for token_id in own.token_ids:
                sequence.append(token_id)
        return FinishedStep(plan, result, begin, self._runner.device.record_event())

    def forget(self) -> None:
        """Let go of the model and its caches."""
        self._of, self._decoder = (None, None), None
        self._known.clear()

    def _current(self) -> CompiledDecoder | None:
        """The decoder of the model with its present caches; None if the model has none, or a profiler looks on."""
        runner = self._runner
        if runner.profile is not None:
            return None
        if self._of[0] is not runner.loaded or self._of[1] is not runner.caches:
            self._of = runner.loaded, runner.caches
            self._decoder = open_decoder(runner)
            self._known.clear()
        return self._decoder

    def _takes(self, decoder: CompiledDecoder, row: Row) -> bool:
        """True if the sequence of a row is sampled from the model's own logits, and has the row's token."""
        sequence = self._runner.slots.sampling[row.slot]
        known = self._known.get(row.slot)
        if known is None or known.sequence is not sequence:
            known = self._known[row.slot] = self._describe(decoder, row.slot, sequence)
        return known.is_plain and sequence.num_tokens == row.start + 1

    def _describe(self, decoder: CompiledDecoder, slot: int, sequence: SamplingSlot) -> KnownSlot:
        """Tell the decoder how a slot's sequence goes on."""
        ends = np.array(sorted(sequence.stop_ids), np.int64)
        described = decoder.slots[slot]
        described.ends, described.num_ends = ends.ctypes.data, len(ends)
        described.least = sequence.num_prompt_tokens + sequence.params.min_tokens
        described.num_prompt = sequence.num_prompt_tokens
        described.repetition = sequence.edits.repetition
        described.frequency, described.presence = sequence.edits.frequency, sequence.edits.presence
        described.draw = parameters(sequence.draw)
        if not sequence.stages.draw:
            described.draw.temperature = 0.0
        media = self._runner.media
        moved = media is not None and media.moves(slot)
        is_plain = sequence.is_plain and not self._runner.slots.adapters[slot] and not moved
        return KnownSlot(sequence, is_plain, ends)


def decodes(row: Row) -> bool:
    """True if a row runs one token and samples the next one, and nothing else is asked for."""
    return (
        row.num_tokens == row.num_samples == 1
        and not row.drafts
        and not row.num_drafts
        and not row.states
        and not row.media
        and not row.entries
    )


def open_decoder(runner: ModelToDecode) -> CompiledDecoder | None:
    """The decoder of a runner's model; None if it has none."""
    config = runner.config
    if runner.device.asynchronous or config.logits_processors:
        return None
    if config.speculative is not None and not config.speculative.in_core:
        return None  # the drafter sees every step
    model = runner.model.model
    network, head = model.base, model.head
    if not isinstance(network, Network) or model.stage is not None or model.encodes:
        return None
    compiled, begins = network.stack.compiled, embedding_rows(network)
    if (
        begins is None
        or head is None
        or isinstance(head, ModuleHead)
        or not isinstance(compiled, CompiledStack)
    ):
        return None
    rows, factor = begins
    output = head if isinstance(head, CappedOutput) else CappedOutput(head)
    caches = [None if place is None else runner.caches[place.layer] for place in network.places]
    slots = runner.slots
    arrays = SequenceArrays(slots.tokens, slots.num_tokens, slots.long_from, slots.block_table)
    parts = DecoderParts(
        rows, network.angles, compiled, caches, output.linear, factor, output.scale, output.softcap
    )
    return CompiledDecoder.of(parts, arrays)


def embedding_rows(network: Network) -> tuple[Weight, float] | None:
    """The table [V, H] whose rows tokens begin with, and their factor; None if there is more to it."""
    embedding = network.embedding
    if embedding is None or embedding != type(embedding)(embedding.words, scale=embedding.scale):
        return None
    words: Any = embedding.words
    if not isinstance(words, ScaledEmbedding):
        rows, factor = rows_of(words), embedding.scale
    elif embedding.scale == 1.0:
        rows, factor = rows_of(words.table), words.factor
    else:
        return None
    return None if rows is None else (rows, factor)


def rows_of(module: Any) -> Weight | None:
    """The table [V, H] that a module looks tokens up in; None if there is no module, or it does more than that."""
    if isinstance(module, QuantisedEmbedding):
        return module.rows
    return dense_weight(module.weight) if type(module) is torch.nn.Embedding else None
