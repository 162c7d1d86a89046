"""Where a drafter's tokens lie in its KV cache: in the blocks of their slot, and behind them in spare ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.data.paging import AttentionBatch
from pagewire.workers.batch.slots import Slots
from pagewire.workers.device.interface import Device


class Places:
    """The blocks of the rows of a drafter's passes in one step.

    The model has computed all tokens of a slot but the last, so only that one and drafts may lie behind the slot's
    blocks. They get spare blocks, at the end of the drafter's cache, which are the next step's again.
    """

    def __init__(
        self,
        slots: Slots,
        slot_ids: Sequence[int],
        num_positions: int,
        num_blocks: int,
        num_spare: int,
        device: Device,
    ) -> None:
        """slot_ids: of R rows. num_positions: that they need at most. num_blocks: of the model's cache.

        num_spare: blocks of each row behind these.
        """
        self.block_size, self._device = slots.block_size, device
        num_columns = -(-num_positions // slots.block_size)
        own = slots.block_table[slot_ids, :num_columns]
        place = np.arange(num_columns) - slots.num_blocks[slot_ids][:, None]  # among the row's spare blocks
        spare = num_blocks + num_spare * np.arange(len(slot_ids))[:, None] + place
        spare = np.where(place < num_spare, spare, 0)
        self.table: NDArray[np.int32] = np.where(place < 0, own, spare).astype(np.int32)

    def tensors(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Tensor, AttentionBatch]:
        """For tokens [start, start + length) of some rows, on the device: positions int64 [T], and attention."""
        table = self.table[list(rows)]
        first, count = np.array([starts, lengths], np.int64)
        ends = count.cumsum()
        of_token = np.repeat(np.arange(len(count)), count)
        positions = np.arange(ends[-1]) + np.repeat(first - (ends - count), count)
        blocks = positions // self.block_size
        kv_slots = positions + (table[of_token, blocks] - blocks) * self.block_size
        seq_lens = first + count
        max_seq_len = int(seq_lens.max())
        query_start_loc = np.zeros(len(count) + 1, np.int32)
        query_start_loc[1:] = ends
        table = np.ascontiguousarray(table[:, : -(-max_seq_len // self.block_size)])
        arrays = (positions, query_start_loc, seq_lens.astype(np.int32), table, kv_slots)
        own, loc, lens, blocks, slots = self._device.upload([torch.from_numpy(array) for array in arrays])
        return own, AttentionBatch(loc, lens, blocks, slots, int(count.max()), max_seq_len)
