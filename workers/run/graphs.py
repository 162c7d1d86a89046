"""CUDA graphs of steps.

A replay works on the memory that it was recorded with, so the batch is copied to `_static` first. Graphs are
recorded for a few shapes; a batch is padded to the next one (see `build_batch`): what it lacks is padding behind
the last request's tokens, since kernels read where each begins. There are shapes for steps of one token of each
request, for one and the most drafts, and for short prompts among whatever else there is, whose launches may take
longer than their work. A stage of a pipeline receives hidden states before a replay and sends its own after it:
they are copied to and from that memory. Where adapters are served, every shape is recorded twice: a graph with
their kernels would cost steps without adapters two launches for each product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pagewire.ipc.wire.worker_messages import StepPlan, WorkerConfig
from pagewire.kernels.data.deltas import AdapterRows
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.kernels.data.states import StateBatch
from pagewire.workers.adapters.interface import ReplayedRows, WorkerAdapters
from pagewire.workers.batch.flat_batch import Batch
from pagewire.workers.batch.slots import Slots
from pagewire.workers.device.gpu_memory import RECORDED_TOKENS
from pagewire.workers.device.interface import Device
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.run.interface import RecordedShape

logger = logging.getLogger("pagewire.worker")

PROMPT_TOKENS = (64, 96, 128, 192, 256, 384, 512, 768, RECORDED_TOKENS)
"""The tokens of recorded steps with prompts."""
FEW_REQUESTS = 8
"""Of recorded steps with prompts: with few requests, the keys of those with one token are split between blocks."""
TOLERANCE = 0.05
"""The largest difference of a replay's states, relative to their size. Products may be summed in another order."""


def recorded_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to record: 1, 2, 4, multiples of 8 up to 256, then multiples of 32, and `max_num_seqs`."""
    sizes = {
        1,
        2,
        4,
        *range(8, min(256, max_num_seqs + 1), 8),
        *range(256, max_num_seqs + 1, 32),
        max_num_seqs,
    }
    return sorted(size for size in sizes if size <= max_num_seqs)


class StepGraphs:
    """Recorded steps of a model, one for each shape, or two where rows may have adapters.

    forward: launches the model for a batch on the device, and those of its rows that have adapters, if any; returns
    hidden states [T, H]. Of a pipeline it has one stage, without receiving and sending.
    shapes: of the steps. max_blocks: KV blocks of the longest request.
    adapted: the memory of rows with adapters; None: no row of a recorded step has one.
    """

    def __init__(
        self,
        device: Device,
        loaded: LoadedModel,
        forward: Callable[[Batch, AdapterRows | None], Tensor],
        shapes: Sequence[RecordedShape],
        max_blocks: int,
        block_size: int,
        adapted: ReplayedRows | None = None,
    ) -> None:
        self._device, self._loaded, self._forward, self._adapted = device, loaded, forward, adapted
        self.shapes, self._block_size = sorted(shapes), block_size
        assert loaded.model.network is not None, "steps of networks alone are recorded"
        self._network = loaded.model.network
        most = RecordedShape(*(max(numbers) for numbers in zip(*shapes, strict=True)))
        self._static = self._padding(most, max_blocks)
        self._replays: dict[tuple[RecordedShape, bool], Callable[[], Tensor]] = {}
        self._tapped: dict[tuple[RecordedShape, bool], dict[int, Tensor]] = {}

    def _padding(self, shape: RecordedShape, max_blocks: int) -> Batch:
        """See `padding_for`."""
        return padding_for(self._loaded, shape, max_blocks, self._block_size, self._device)

    @classmethod
    @torch.inference_mode()
    def recorded(
        cls,
        config: WorkerConfig,
        device: Device,
        loaded: LoadedModel,
        forward: Callable[[Batch, AdapterRows | None], Tensor],
        adapters: WorkerAdapters,
    ) -> StepGraphs | None:
        """Graphs for all shapes of a worker; None, with a log line, if they compute something else."""
        max_blocks = -(-loaded.max_model_len // config.block_size)
        shapes = recorded_shapes(config, loaded.max_model_len)
        reason = why_prompts_wait(loaded, shapes, config.block_size, device, forward)
        if reason is not None:
            logger.info("prompts are launched kernel by kernel: the model waits for the device: %s", reason)
            shapes = [shape for shape in shapes if shape.num_each == 1]
        most = max(shape.num_tokens for shape in shapes)
        adapted = adapters.recorded_rows(most)
        graphs = cls(device, loaded, forward, shapes, max_blocks, config.block_size, adapted)
        graphs.record()
        graphs.drop_wrong()
        for num_each in sorted({shape.num_each for shape in shapes}):
            sizes = [f"{shape[0]}/{shape[1]}" for shape in graphs.shapes if shape.num_each == num_each]
            each = "a token" if num_each == 1 else f"up to {num_each} tokens"
            if sizes:
                logger.info("recorded CUDA graphs for %s tokens/requests, %s of each", ", ".join(sizes), each)
            else:
                logger.warning(
                    "steps of %s of each request are launched kernel by kernel: replayed CUDA graphs compute "
                    "something else",
                    each,
                )
        return graphs if graphs.shapes else None

    def record(self) -> None:
        """Record all shapes, the largest first, so that the others reuse its memory."""
        for shape in sorted(self.shapes, key=lambda shape: -shape.num_tokens):
            batch = _first(self._static, shape)
            self._record(shape, batch, None)
            if self._adapted is not None:
                self._record(shape, batch, self._adapted.first(shape.num_tokens))

    def _record(self, shape: RecordedShape, batch: Batch, rows: AdapterRows | None) -> None:
        key = shape, rows is not None
        self._replays[key] = self._device.record(partial(self._forward, batch, rows))
        # What it keeps of layers is in the recording's memory, too.
        self._tapped[key] = self._network.tapped

    def drop_wrong(self) -> None:
        """Drop the shapes whose replays do not give other tokens the states that the model gives them.

        These go to the first KV block. A launch that was not recorded, on another stream or with memory of another
        allocator, shows here.
        """
        wrong = [each for each in {shape.num_each for shape in self.shapes} if not self._is_right(each)]
        self.shapes = [shape for shape in self.shapes if shape.num_each not in wrong]
        self._replays = {key: replay for key, replay in self._replays.items() if key[0] in self.shapes}

    def _is_right(self, num_each: int) -> bool:
        """See `drop_wrong`: for the least shape of up to this many tokens of each request."""
        shape = next(shape for shape in self.shapes if shape.num_each == num_each)
        count = min(shape.num_each, shape.num_tokens, self._block_size)
        batch = self._padding(shape, 1)
        places = torch.arange(count, device=self._device.torch_device)
        batch.input_ids.fill_(1)
        batch.positions[:count].copy_(places)
        batch.attention.slot_mapping[:count].copy_(places)
        batch.attention.seq_lens[:1].fill_(count)
        batch.attention.query_start_loc[1:].fill_(count)
        if batch.states is not None:  # a span of these tokens, from zeros to the first slot
            batch.states.row_starts[1:].fill_(1)
            batch.states.spans[0, 1].fill_(count)
            batch.states.spans[0, 2].fill_(-1)
        received = batch.received
        if received is not None:  # which the forward overwrites
            received.view(-1).copy_(torch.linspace(-1, 1, received.numel(), device=received.device))
            received = received.clone()
        expected = self._forward(batch, None)[:count].float().clone()
        batch = replace(batch, received=received)
        difference = (self.replay(shape, batch)[:count].float() - expected).norm()
        return bool(difference <= TOLERANCE * expected.norm())

    def shape_for(self, plan: StepPlan, slots: Slots, adapters: WorkerAdapters) -> RecordedShape | str:
        """The recorded shape to which the requests of a plan are padded, or why no recorded step can run it."""
        # What is pooled is read when the step finishes; by then the next replay may have overwritten the hidden
        # states of a graph. A graph looks up tokens only.
        if any(row.pool or row.media or row.entries for row in plan.rows):
            return "a row is pooled, or brings more than tokens"
        used = slots.adapters[[row.slot for row in plan.rows]]
        if used.any() and not adapters.can_replay(used):
            return "an adapter is larger than those of recorded steps"
        lengths = [row.num_tokens for row in plan.rows]
        needed = RecordedShape(sum(lengths), len(lengths), max(lengths))
        fitting = (shape for shape in self.shapes if shape.has_room(needed))
        return next(fitting, "no recorded step has room for as many tokens")

    def replay(self, shape: RecordedShape, batch: Batch, adapters: AdapterRows | None = None) -> Tensor:
        """Hidden states [tokens, H] of a batch that is padded to a shape. The next replay overwrites them.

        adapters: the rows of the batch that have adapters, each one that `ReplayedRows` can hold; None: none has.
        """
        given, static = batch.attention, self._static.attention
        num_tokens, size, _ = shape
        self._static.input_ids[:num_tokens].copy_(batch.input_ids)
        self._static.positions[:num_tokens].copy_(batch.positions)
        static.query_start_loc[: size + 1].copy_(given.query_start_loc)
        static.seq_lens[:size].copy_(given.seq_lens)
        static.slot_mapping[:num_tokens].copy_(given.slot_mapping)
        static.block_table[:size, : given.block_table.shape[1]].copy_(given.block_table)
        if self._static.states is not None and batch.states is not None:
            self._static.states.row_starts[: size + 1].copy_(batch.states.row_starts)
            self._static.states.spans[: len(batch.states.spans)].copy_(batch.states.spans)
        if self._static.received is not None and batch.received is not None:
            self._static.received[: len(batch.received)].copy_(batch.received)
            # What the last replay has left of a padding token would go through the layers again and again.
            self._static.received[len(batch.received) : num_tokens].zero_()
        if adapters is not None:
            assert self._adapted is not None, "no rows with adapters were recorded"
            self._adapted.fill(adapters)
        key = shape, adapters is not None
        states = self._replays[key]()
        self._network.tapped = self._tapped[key]
        return states


def why_prompts_wait(
    loaded: LoadedModel,
    shapes: Sequence[RecordedShape],
    block_size: int,
    device: Device,
    forward: Callable[[Batch, AdapterRows | None], Tensor],
) -> str | None:
    """Why steps with prompts cannot be recorded, see `Device.why_it_waits`; None: they can, or none would be."""
    if (shape := next((shape for shape in shapes if shape.num_each > 1), None)) is None:
        return None
    batch = padding_for(loaded, shape, 1, block_size, device)
    return device.why_it_waits(lambda: forward(batch, None))


def recorded_shapes(config: WorkerConfig, max_model_len: int) -> list[RecordedShape]:
    """The shapes of steps to record for a worker, if they do not wait for the device."""
    max_tokens, max_requests = config.max_num_batched_tokens, config.max_num_seqs
    shapes = {RecordedShape(size, size, 1) for size in recorded_sizes(min(max_requests, max_tokens))}
    if config.speculative is not None:
        num_each = 1 + config.speculative.num_speculative_tokens
        most = min(max_requests, max_tokens // num_each)
        shapes |= {RecordedShape(size * num_each, size, num_each) for size in recorded_sizes(most) if size}
    sizes = [size for size in PROMPT_TOKENS if size <= min(max_tokens, max_requests * max_model_len)]
    shapes |= {
        RecordedShape(size, min(size, count), max(sizes))
        for size in sizes
        for count in (min(FEW_REQUESTS, max_requests), max_requests)
    }
    return sorted(shapes)


def padding_for(
    loaded: LoadedModel, shape: RecordedShape, max_blocks: int, block_size: int, device: Device
) -> Batch:
    """A `padding_batch` with all that a model needs: spans of states, and the hidden states of the stage before."""
    recurrent, stage = bool(loaded.state_shapes), loaded.model.stage
    batch = padding_batch(shape, max_blocks, block_size, device.torch_device, recurrent=recurrent)
    return replace(batch, received=None if stage is None else stage.zeros(shape.num_tokens))


def padding_batch(
    shape: RecordedShape,
    max_blocks: int,
    block_size: int,
    device: torch.device,
    *,
    recurrent: bool = False,
) -> Batch:
    """A batch of padding requests, with room for `max_blocks` KV blocks of each.

    recurrent: it has room for spans of states, of which each has a token at least.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    num_tokens, size, num_each = shape
    return Batch(
        input_ids=zeros(num_tokens, dtype=torch.int64),
        positions=zeros(num_tokens, dtype=torch.int64),
        attention=AttentionBatch(
            query_start_loc=zeros(size + 1),
            seq_lens=zeros(size),
            block_table=zeros(size, max_blocks),
            slot_mapping=zeros(num_tokens, dtype=torch.int64).fill_(-1),
            max_query_len=num_each,
            max_seq_len=max_blocks * block_size,
        ),
        sample_rows=[],
        sample_indices=zeros(0, dtype=torch.int64),
        sample_slots=zeros(0, dtype=torch.int64),
        starts=[],
        needs_relay=True,
        drafted=False,
        states=StateBatch(zeros(size + 1), zeros(num_tokens, 4)) if recurrent else None,
    )


def _first(batch: Batch, shape: RecordedShape) -> Batch:
    """The first requests and tokens of a padding batch, as views, in a shape."""
    a, (num_tokens, size, num_each) = batch.attention, shape
    attention = replace(
        a,
        query_start_loc=a.query_start_loc[: size + 1],
        seq_lens=a.seq_lens[:size],
        block_table=a.block_table[:size],
        slot_mapping=a.slot_mapping[:num_tokens],
        max_query_len=num_each,
    )
    states = batch.states
    if states is not None:
        states = StateBatch(states.row_starts[: size + 1], states.spans[:num_tokens])
    received = None if batch.received is None else batch.received[:num_tokens]
    return replace(
        batch,
        input_ids=batch.input_ids[:num_tokens],
        positions=batch.positions[:num_tokens],
        attention=attention,
        states=states,
        received=received,
    )
