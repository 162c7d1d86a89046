"""Steps that only decode, in one call of the compiled kernels: from the plan's rows to their tokens.

It takes plans in which each row runs one token and samples the next one, without drafts, masks, adapters and media,
and whose logits are changed by penalties and min_tokens alone; of a model that is one compiled stack between a
table of embeddings and an output layer (`route.py` has the other ways).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.ipc.wire.worker_messages import Row, RowResult, StepPlan, StepResult, Way, WorkerConfig
from pagewire.kernels.cpu.decode import CompiledDecoder, DecoderParts, SequenceArrays, TokenInputs
from pagewire.kernels.cpu.drawing import parameters
from pagewire.kernels.cpu.embeddings import Beginning
from pagewire.kernels.cpu.stack import CompiledStack
from pagewire.kernels.data.layer import Norm
from pagewire.kernels.data.paging import Cache
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.kernels.output import CappedOutput
from pagewire.workers.batch.slots import Slots
from pagewire.workers.device.interface import Device
from pagewire.workers.media.interface import WorkerMedia
from pagewire.workers.module.transforms import QuantisedEmbedding, ScaledEmbedding
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.model import Model
from pagewire.workers.network.module_base import linear_of
from pagewire.workers.network.network import Network
from pagewire.workers.run.interface import Quiet
from pagewire.workers.run.step import FinishedStep
from pagewire.workers.sample.sampler import SamplingSlot

MODULE_LAYERS = "the layers run as a module of transformers"
NO_COMPILED_STACK = "the layers have no compiled stack"
MODULE_HEAD = "the output layer is a module"
OTHER_KINDS = "layers, table and output layer are not of one kind"


class KnownSlot(NamedTuple):
    """A slot's sequence as the decoder has it. is_plain: it can be taken. ends: memory that the decoder reads."""

    sequence: SamplingSlot
    is_plain: bool
    ends: NDArray[np.int64]


class Decoding:
    """Runs plans of a model."""

    def __init__(self, config: WorkerConfig, device: Device, slots: Slots, media: WorkerMedia) -> None:
        self._config, self._device, self._slots, self._media = config, device, slots, media
        self._decoder: CompiledDecoder | str = "no model is loaded"
        self._known: dict[int, KnownSlot] = {}

    def use(self, loaded: LoadedModel, caches: Sequence[Cache], states: Sequence[Tensor]) -> None:
        """Decode with this model from now on, and with these caches of its layers and their states."""
        self._decoder = open_decoder(self._config, self._device, self._slots, loaded.model, caches, states)
        self._known.clear()

    @property
    def why_not(self) -> str:
        """Why it takes no plan of this model; empty: it takes some."""
        return self._decoder if isinstance(self._decoder, str) else ""

    def refusal(self, plan: StepPlan) -> str:
        """Why it does not take a plan that was applied to the slots; empty: it does."""
        decoder = self._decoder
        if isinstance(decoder, str):
            return decoder
        if plan.masked:
            return "a grammar masks tokens"
        if not all(map(decodes, plan.rows)):
            return "a row runs other than one token, to sample the next one"
        if not all(self._takes(decoder, row) for row in plan.rows):
            return "a sequence has an adapter, or changes its logits by other than penalties and min_tokens"
        return ""

    def run(self, plan: StepPlan, quiet: Quiet | None) -> FinishedStep | Tensor:
        """Run a plan that it does not refuse. quiet: None: it stays so.

        Where its logits cannot be sampled, its hidden states [R, H] are returned: layers have changed their states.
        """
        rows, slots, decoder = plan.rows, self._slots, self._decoder
        assert not isinstance(decoder, str), decoder
        begin = self._device.record_event()
        num_steps = plan.num_steps if quiet is None or quiet.check() else 1
        about = np.array([[row.slot for row in rows], [row.start for row in rows]], np.int64)
        descriptors = np.array([] if quiet is None else quiet.descriptors, np.int32)
        states = None
        if decoder.keeps_states:
            states = np.array([[row.state, row.states[0][1]] for row in rows], np.int32)
        chosen = decoder(about[0], about[1], num_steps, descriptors, states)
        if not len(chosen):
            return decoder.hidden[: len(rows)].clone()
        rows_of_tokens = [RowResult(tokens) for tokens in chosen.T.tolist()]
        result = StepResult(plan.step_id, rows_of_tokens, way=Way.DECODING)
        for row, own in zip(rows, result.rows, strict=True):
            sequence = slots.sampling[row.slot]
            for token_id in own.token_ids:
                sequence.append(token_id)
        return FinishedStep(plan, result, begin, self._device.record_event())

    def forget(self) -> None:
        """Let go of the model and its caches."""
        self._decoder = "no model is loaded"
        self._known.clear()

    def _takes(self, decoder: CompiledDecoder, row: Row) -> bool:
        """True if the sequence of a row is sampled from the model's own logits, and has the row's token."""
        sequence = self._slots.sampling[row.slot]
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
        is_plain = sequence.is_plain and not self._slots.adapters[slot] and not self._media.moves(slot)
        return KnownSlot(sequence, is_plain, ends)


def decodes(row: Row) -> bool:
    """True if a row runs one token and samples the next one, and nothing else is asked for."""
    return (
        row.num_tokens == row.num_samples == 1
        and not row.drafts
        and not row.num_drafts
        and len(row.states) <= 1
        and not row.media
        and not row.entries
    )


def open_decoder(
    config: WorkerConfig,
    device: Device,
    slots: Slots,
    model: Model,
    caches: Sequence[Cache],
    states: Sequence[Tensor],
) -> CompiledDecoder | str:
    """The decoder of a model with caches of its layers and their states, or why it has none."""
    network, head = model.network, linear_of(model.head)
    if device.asynchronous:
        return "steps are not recorded on this device"
    if reason := refusal_by_options(config):
        return reason
    if network is None:
        return MODULE_LAYERS
    if model.stage is not None or model.encodes:
        return "the model is a stage of a pipeline, or encodes"
    if not isinstance(compiled := network.stack.compiled, CompiledStack):
        return NO_COMPILED_STACK
    begins, inputs = beginning(network), token_inputs(network)
    if begins is None or (inputs is None) != (network.layer_inputs is None):
        return "a token begins with more than rows of tables"
    if head is None:
        return MODULE_HEAD
    output = head if isinstance(head, CappedOutput) else CappedOutput(head)
    of_layers = [None if place is None else caches[place.layer] for place in network.places]
    memory = iter(states)
    of_mixers = [[next(memory) for _ in shapes] for shapes in network.stack.states] if states else None
    arrays = SequenceArrays(slots.tokens, slots.num_tokens, slots.long_from, slots.block_table)
    parts = DecoderParts(
        begins,
        network.angles,
        compiled,
        of_layers,
        output.linear,
        output.scale,
        output.softcap,
        of_mixers,
        inputs,
    )
    return CompiledDecoder.of(parts, arrays) or OTHER_KINDS


def refusal_by_options(config: WorkerConfig) -> str:
    """Why steps with these options are no compiled decoding of any model; empty if they may be."""
    if config.logits_processors:
        return "logits processors look at every step"
    if config.speculative is not None and not config.speculative.in_core:
        return "the drafter looks at every step"
    return ""


def beginning(network: Network) -> Beginning | None:
    """What the tokens of a network begin with; None if there is more to it than rows of tables."""
    embedding = network.embedding
    if embedding is None or embedding.token_types is not None:
        return None
    words, factor = unscaled(embedding.words)
    if embedding.scale != 1.0:
        words, factor = (words, embedding.scale) if factor == 1.0 else (None, factor)
    rows = rows_of(words)
    positions = None if embedding.positions is None else rows_of(embedding.positions)
    if rows is None or (positions is None) != (embedding.positions is None):
        return None
    return Beginning(rows, factor, positions, embedding.norm)


def token_inputs(network: Network) -> TokenInputs | None:
    """What a network's layers get of tokens beside states; None if it is nothing, or more than decode.cpp makes."""
    inputs = network.layer_inputs
    if inputs is None or not isinstance(inputs.norm, Norm):
        return None
    words, factor = unscaled(inputs.words)
    if (rows := rows_of(words)) is None:
        return None
    return TokenInputs(rows, factor, inputs.projection, inputs.projection_scale, inputs.norm, inputs.scale)


def unscaled(words: Any) -> tuple[Any, float]:
    """The table in a module that looks tokens up, and what its rows are multiplied by."""
    return (words.table, words.factor) if isinstance(words, ScaledEmbedding) else (words, 1.0)


def rows_of(module: Any) -> Weight | None:
    """The table [V, H] that a module looks tokens up in; None if there is no module, or it does more than that."""
    if isinstance(module, QuantisedEmbedding):
        return module.rows
    return dense_weight(module.weight) if type(module) is torch.nn.Embedding else None
