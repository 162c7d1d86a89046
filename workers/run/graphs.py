"""CUDA graphs of decode steps, in which every request runs one token.

A replay works on the memory that it was recorded with, so the batch is copied to `_static` first. Graphs are
recorded for a few batch sizes; a batch is padded to the next one (see `build_batch`). Where adapters are served,
every size is recorded twice: a graph with their kernels would cost steps without adapters two launches for each
product.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagewire.ipc.wire.worker_messages import StepPlan, WorkerConfig
from pagewire.kernels.data.deltas import AdapterRows
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.workers.adapters.recorded import RecordedRows
from pagewire.workers.batch.flat_batch import Batch
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


class DecodeGraphs:
    """Recorded decode steps of a model, one for each batch size, or two where rows may have adapters.

    forward: launches the model for a batch on the device, and those of its rows that have adapters, if any; returns
    final hidden states [T, H].
    sizes: batch sizes, ascending. max_blocks: KV blocks of the longest request.
    adapted: the memory of rows with adapters; None: no row of a recorded step has one.
    """

    def __init__(
        self,
        device: Device,
        forward: Callable[[Batch, AdapterRows | None], Tensor],
        sizes: Sequence[int],
        max_blocks: int,
        block_size: int,
        adapted: RecordedRows | None = None,
    ) -> None:
        self._device, self._forward, self.sizes, self._adapted = device, forward, list(sizes), adapted
        self._block_size = block_size
        self._static = _empty_batch(self.sizes[-1], max_blocks, max_blocks * block_size, device.torch_device)
        self._replays: dict[tuple[int, bool], Callable[[], Tensor]] = {}

    @classmethod
    @torch.inference_mode()
    def recorded(
        cls,
        config: WorkerConfig,
        device: Device,
        max_model_len: int,
        forward: Callable[[Batch, AdapterRows | None], Tensor],
        adapters: Adapters | None,
    ) -> DecodeGraphs | None:
        """Graphs for all batch sizes of a worker; None, with a log line, if they compute something else."""
        sizes = recorded_sizes(min(config.max_num_seqs, config.max_num_batched_tokens))
        adapted = None if adapters is None else adapters.recorded_rows(sizes[-1])
        max_blocks = -(-max_model_len // config.block_size)
        graphs = cls(device, forward, sizes, max_blocks, config.block_size, adapted)
        graphs.record()
        if not graphs.are_right():
            logger.warning("steps are launched kernel by kernel: replayed CUDA graphs compute something else")
            return None
        logger.info("recorded CUDA graphs for batches of %s requests", ", ".join(map(str, sizes)))
        return graphs

    def record(self) -> None:
        """Record all sizes, the largest first, so that the others reuse its memory."""
        for size in reversed(self.sizes):
            batch = _first(self._static, size)
            self._replays[size, False] = self._device.record(partial(self._forward, batch, None))
            if self._adapted is not None:
                rows = self._adapted.first(size)
                self._replays[size, True] = self._device.record(partial(self._forward, batch, rows))

    def are_right(self) -> bool:
        """True if a replay gives another token the states that the model gives it; they go to the first KV block.

        A launch that was not recorded, on another stream or with memory of another allocator, shows here.
        """
        batch = _empty_batch(1, 1, self._block_size, self._device.torch_device)
        batch.input_ids.fill_(1)
        for tensor, number in ((batch.attention.seq_lens, 1), (batch.attention.slot_mapping, 0)):
            tensor.fill_(number)
        batch.attention.query_start_loc[1:].fill_(1)
        expected = self._forward(batch, None).float().clone()
        difference = (self.replay(batch).float() - expected).norm()
        return bool(difference <= TOLERANCE * expected.norm())

    def size_for(self, plan: StepPlan, slots: Slots, adapters: Adapters | None) -> int | None:
        """The recorded size to which the requests of a plan are padded; None if no recorded step can run it."""
        # What is pooled is read when the step finishes; by then the next replay may have overwritten the hidden
        # states of a graph. A graph looks up tokens only.
        if any(row.num_tokens != 1 or row.pool or row.media for row in plan.rows):
            return None
        used = slots.adapters[[row.slot for row in plan.rows]]
        if used.any() and (adapters is None or not adapters.can_replay(used)):
            return None
        place = bisect_left(self.sizes, len(plan.rows))
        return self.sizes[place] if place < len(self.sizes) else None

    def replay(self, batch: Batch, adapters: AdapterRows | None = None) -> Tensor:
        """Hidden states [size, H] of a batch that is padded to a recorded size. The next replay overwrites them.

        adapters: the rows of the batch that have adapters, each one that `RecordedRows` can hold; None: none has.
        """
        size = len(batch.input_ids)
        given, static = batch.attention, self._static.attention
        self._static.input_ids[:size].copy_(batch.input_ids)
        self._static.positions[:size].copy_(batch.positions)
        static.query_start_loc[: size + 1].copy_(given.query_start_loc)
        static.seq_lens[:size].copy_(given.seq_lens)
        static.slot_mapping[:size].copy_(given.slot_mapping)
        static.block_table[:size, : given.block_table.shape[1]].copy_(given.block_table)
        if adapters is not None:
            assert self._adapted is not None, "no rows with adapters were recorded"
            self._adapted.fill(adapters)
        return self._replays[size, adapters is not None]()


def _empty_batch(size: int, max_blocks: int, max_seq_len: int, device: torch.device) -> Batch:
    """A batch of `size` padding requests."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Batch(
        input_ids=zeros(size, dtype=torch.int64),
        positions=zeros(size, dtype=torch.int64),
        attention=AttentionBatch(
            query_start_loc=zeros(size + 1),
            seq_lens=zeros(size),
            block_table=zeros(size, max_blocks),
            slot_mapping=zeros(size, dtype=torch.int64).fill_(-1),
            max_query_len=1,
            max_seq_len=max_seq_len,
        ),
        sample_rows=[],
        sample_indices=zeros(0, dtype=torch.int64),
        sample_slots=zeros(0, dtype=torch.int64),
        starts=[],
        needs_relay=True,
        drafted=False,
    )


def _first(batch: Batch, size: int) -> Batch:
    """The first `size` requests of a decode batch, as views."""
    a = batch.attention
    attention = replace(
        a,
        query_start_loc=a.query_start_loc[: size + 1],
        seq_lens=a.seq_lens[:size],
        block_table=a.block_table[:size],
        slot_mapping=a.slot_mapping[:size],
    )
    return replace(
        batch, input_ids=batch.input_ids[:size], positions=batch.positions[:size], attention=attention
    )
