"""Steps in which every request runs one token, recorded once for some numbers of requests and replayed.

A replay does what was recorded over the same memory: the batch is copied into `_static` first. Few sizes are
recorded; a batch is padded to the next one with requests that have nothing in the cache and write nowhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels.attention import AttentionBatch
from pagewire.workers.batch import Batch
from pagewire.workers.device.interface import Device


def recorded_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests: 1, 2, 4, then multiples of 8, and from 256 on of 32."""
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
    """Recorded steps of a model.

    forward: launches the model's work for a batch on the device: final hidden states [T, H].
    sizes: ascending. max_blocks: of a request.
    """

    def __init__(
        self,
        device: Device,
        forward: Callable[[Batch], Tensor],
        sizes: Sequence[int],
        max_blocks: int,
        block_size: int,
    ) -> None:
        self._device, self._forward, self.sizes = device, forward, list(sizes)
        self._static = _empty_batch(self.sizes[-1], max_blocks, max_blocks * block_size, device.torch_device)
        self._replays: dict[int, Callable[[], Tensor]] = {}

    def record(self) -> None:
        """Record all sizes. The largest comes first: the others find room in what it took."""
        for size in reversed(self.sizes):
            self._replays[size] = self._device.record(partial(self._forward, _first(self._static, size)))

    def size_for(self, num_requests: int) -> int | None:
        """The size to which a batch of so many requests is padded; None: there is none."""
        place = bisect_left(self.sizes, num_requests)
        return self.sizes[place] if place < len(self.sizes) else None

    def replay(self, batch: Batch) -> Tensor:
        """Run a batch on the device, padded to one of the sizes: [size, H], until the next replay."""
        size = len(batch.input_ids)
        given, static = batch.attention, self._static.attention
        self._static.input_ids[:size].copy_(batch.input_ids)
        self._static.positions[:size].copy_(batch.positions)
        static.query_start_loc[: size + 1].copy_(given.query_start_loc)
        static.seq_lens[:size].copy_(given.seq_lens)
        static.slot_mapping[:size].copy_(given.slot_mapping)
        static.block_table[:size, : given.block_table.shape[1]].copy_(given.block_table)
        return self._replays[size]()


def _empty_batch(size: int, max_blocks: int, max_seq_len: int, device: torch.device) -> Batch:
    """`size` requests with no token in the cache."""

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
    )


def _first(batch: Batch, size: int) -> Batch:
    """Its first `size` requests of one token each."""
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
