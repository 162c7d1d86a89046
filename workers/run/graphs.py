"""CUDA graphs of decode steps, in which every request runs one token, or one and drafts.

A replay works on the memory that it was recorded with, so the batch is copied to `_static` first. Graphs are
recorded for a few batch sizes; a batch is padded to the next one (see `build_batch`). Where adapters are served,
every size is recorded twice: a graph with their kernels would cost steps without adapters two launches for each
product. Where tokens are proposed, steps of one token and the most drafts of each request are recorded, too. Where
requests have fewer the rest is padding behind the last one's tokens: kernels read where each begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from pagewire.ipc.wire.worker_messages import StepPlan, WorkerConfig
from pagewire.kernels.data.deltas import AdapterRows
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.kernels.data.states import StateBatch
from pagewire.workers.adapters.recorded import RecordedRows
from pagewire.workers.batch.flat_batch import NO_SPAN, Batch
from pagewire.workers.batch.slots import Slots
from pagewire.workers.device.interface import Device

if TYPE_CHECKING:
    from pagewire.workers.adapters.loader import Adapters

logger = logging.getLogger("pagewire.worker")

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


class RecordedShape(NamedTuple):
    """The shape of a recorded step: `num_requests` of `num_each` tokens."""

    num_requests: int
    num_each: int

    @property
    def num_tokens(self) -> int:
        """Of all requests."""
        return self.num_requests * self.num_each


class Tapped(Protocol):
    """The part of a `Network` that a forward sets beside its result."""

    tapped: dict[int, Tensor]


class DecodeGraphs:
    """Recorded decode steps of a model, one for each shape, or two where rows may have adapters.

    forward: launches the model for a batch on the device, and those of its rows that have adapters, if any; returns
    final hidden states [T, H].
    shapes: of the steps. max_blocks: KV blocks of the longest request.
    adapted: the memory of rows with adapters; None: no row of a recorded step has one.
    network: keeps results of layers of each step; None: the model does not.
    recurrent: the model keeps states, of which each request has a span.
    """

    def __init__(
        self,
        device: Device,
        forward: Callable[[Batch, AdapterRows | None], Tensor],
        shapes: Sequence[RecordedShape],
        max_blocks: int,
        block_size: int,
        adapted: RecordedRows | None = None,
        network: Tapped | None = None,
        recurrent: bool = False,
    ) -> None:
        self._device, self._forward, self._adapted, self._network = device, forward, adapted, network
        self.shapes, self._block_size = sorted(shapes), block_size
        most, most_each = (max(numbers) for numbers in zip(*shapes, strict=True))
        self._recurrent = recurrent
        self._static = self._padding(most, most_each, max_blocks)
        self._replays: dict[tuple[RecordedShape, bool], Callable[[], Tensor]] = {}
        self._tapped: dict[tuple[RecordedShape, bool], dict[int, Tensor]] = {}

    def _padding(self, size: int, num_each: int, max_blocks: int) -> Batch:
        """See `padding_batch`."""
        device = self._device.torch_device
        return padding_batch(size, num_each, max_blocks, self._block_size, device, self._recurrent)

    @classmethod
    @torch.inference_mode()
    def recorded(
        cls,
        config: WorkerConfig,
        device: Device,
        max_model_len: int,
        forward: Callable[[Batch, AdapterRows | None], Tensor],
        adapters: Adapters | None,
        network: Tapped | None = None,
        recurrent: bool = False,
    ) -> DecodeGraphs | None:
        """Graphs for all shapes of a worker; None, with a log line, if they compute something else."""
        shapes = recorded_shapes(config, max_model_len, recurrent)
        most = max(shape.num_tokens for shape in shapes)
        adapted = None if adapters is None else adapters.recorded_rows(most)
        max_blocks = -(-max_model_len // config.block_size)
        graphs = cls(device, forward, shapes, max_blocks, config.block_size, adapted, network, recurrent)
        graphs.record()
        if not graphs.are_right():
            logger.warning("steps are launched kernel by kernel: replayed CUDA graphs compute something else")
            return None
        for num_each in sorted({shape.num_each for shape in shapes}):
            sizes = ", ".join(
                str(shape.num_requests) for shape in graphs.shapes if shape.num_each == num_each
            )
            each = "a token" if num_each == 1 else f"{num_each} tokens"
            logger.info("recorded CUDA graphs for batches of %s requests, of %s each", sizes, each)
        return graphs

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
        if self._network is not None:  # these tensors are the recording's, too
            self._tapped[key] = self._network.tapped

    def are_right(self) -> bool:
        """True if a replay gives other tokens the states that the model gives them; they go to the first KV block.

        A launch that was not recorded, on another stream or with memory of another allocator, shows here.
        """
        return all(self._is_right(num_each) for num_each in {shape.num_each for shape in self.shapes})

    def _is_right(self, num_each: int) -> bool:
        """See `are_right`: for the least shape of this many tokens of each request."""
        batch = self._padding(1, num_each, 1)
        places = torch.arange(num_each, device=self._device.torch_device)
        batch.input_ids.fill_(1)
        batch.positions.copy_(places)
        batch.attention.slot_mapping.copy_(places)
        batch.attention.seq_lens.fill_(num_each)
        batch.attention.query_start_loc[1:].fill_(num_each)
        if batch.states is not None:  # a span of the token, from zeros to the first slot
            batch.states.row_starts[1:].fill_(1)
            batch.states.spans[0, 1] = 1
        expected = self._forward(batch, None).float().clone()
        difference = (self.replay(batch).float() - expected).norm()
        return bool(difference <= TOLERANCE * expected.norm())

    def shape_for(self, plan: StepPlan, slots: Slots, adapters: Adapters | None) -> RecordedShape | None:
        """The recorded shape to which the requests of a plan are padded; None if no recorded step can run it."""
        # What is pooled is read when the step finishes; by then the next replay may have overwritten the hidden
        # states of a graph. A graph looks up tokens only.
        if not plan.rows or any(row.pool or row.media for row in plan.rows):
            return None
        most = max(row.num_tokens for row in plan.rows)
        if self._static.states is not None and any(len(row.states) != 1 for row in plan.rows):
            return None
        used = slots.adapters[[row.slot for row in plan.rows]]
        if used.any() and (adapters is None or not adapters.can_replay(used)):
            return None
        fitting = (s for s in self.shapes if s.num_each >= most and s.num_requests >= len(plan.rows))
        return next(fitting, None)

    def replay(self, batch: Batch, adapters: AdapterRows | None = None) -> Tensor:
        """Hidden states [tokens, H] of a batch that is padded to a recorded shape. The next replay overwrites them.

        adapters: the rows of the batch that have adapters, each one that `RecordedRows` can hold; None: none has.
        """
        given, static = batch.attention, self._static.attention
        size, num_tokens = len(given.seq_lens), len(batch.input_ids)
        self._static.input_ids[:num_tokens].copy_(batch.input_ids)
        self._static.positions[:num_tokens].copy_(batch.positions)
        static.query_start_loc[: size + 1].copy_(given.query_start_loc)
        static.seq_lens[:size].copy_(given.seq_lens)
        static.slot_mapping[:num_tokens].copy_(given.slot_mapping)
        static.block_table[:size, : given.block_table.shape[1]].copy_(given.block_table)
        if self._static.states is not None and batch.states is not None:
            self._static.states.row_starts[: size + 1].copy_(batch.states.row_starts)
            self._static.states.spans[:size].copy_(batch.states.spans)
        if adapters is not None:
            assert self._adapted is not None, "no rows with adapters were recorded"
            self._adapted.fill(adapters)
        key = RecordedShape(size, num_tokens // size), adapters is not None
        states = self._replays[key]()
        if self._network is not None:
            self._network.tapped = self._tapped[key]
        return states


def recorded_shapes(config: WorkerConfig, max_model_len: int, recurrent: bool = False) -> list[RecordedShape]:
    """The shapes of steps to record for a worker: of one token of each request, and of one and the most drafts.

    recurrent: the model keeps states. Those of drafted tokens are kept where each draft ends: no shape has them.
    """
    shapes = [
        RecordedShape(size, 1)
        for size in recorded_sizes(min(config.max_num_seqs, config.max_num_batched_tokens))
    ]
    num_each = 1 if config.speculative is None else 1 + config.speculative.num_speculative_tokens
    # The tokens of a trial lie in one block, see `DecodeGraphs.are_right`.
    if 1 < num_each <= min(config.block_size, max_model_len) and not recurrent:
        most = min(config.max_num_seqs, config.max_num_batched_tokens // num_each)
        shapes += [RecordedShape(size, num_each) for size in recorded_sizes(most) if size]
    return shapes


def padding_batch(
    size: int,
    num_each: int,
    max_blocks: int,
    block_size: int,
    device: torch.device,
    recurrent: bool = False,
) -> Batch:
    """A batch of `size` padding requests of `num_each` tokens, with room for `max_blocks` KV blocks of each.

    recurrent: it has room for a span of states of each request.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    num_tokens = size * num_each
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
        states=StateBatch(zeros(size + 1), torch.tensor([NO_SPAN] * size, dtype=torch.int32, device=device))
        if recurrent
        else None,
    )


def _first(batch: Batch, shape: RecordedShape) -> Batch:
    """The first requests of a decode batch, as views, in a shape."""
    a, size, num_tokens = batch.attention, shape.num_requests, shape.num_tokens
    attention = replace(
        a,
        query_start_loc=a.query_start_loc[: size + 1],
        seq_lens=a.seq_lens[:size],
        block_table=a.block_table[:size],
        slot_mapping=a.slot_mapping[:num_tokens],
        max_query_len=shape.num_each,
    )
    states = batch.states
    if states is not None:
        states = StateBatch(states.row_starts[: size + 1], states.spans[:size])
    return replace(
        batch,
        input_ids=batch.input_ids[:num_tokens],
        positions=batch.positions[:num_tokens],
        attention=attention,
        states=states,
    )
