"""A plan's rows as one flat batch of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.ipc.messages import Row
from pagewire.kernels.attention import AttentionBatch
from pagewire.workers.slots import Slots


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step runs: T tokens of R requests, in the order of the rows."""

    input_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]."""
    attention: AttentionBatch
    sample_rows: list[int]
    """Rows of the plan that sample."""
    sample_indices: Tensor
    """int64 [their number]: the last token of each of them."""
    starts: list[int]
    """Where each row's tokens begin in the batch."""


def build_batch(rows: Sequence[Row], slots: Slots) -> Batch:
    """The batch for `rows`, after `slots.apply`."""
    slot_ids = np.array([row.slot for row in rows], np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    lengths = np.array([row.num_tokens for row in rows], np.int64)
    query_start_loc = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])

    token_slots = np.repeat(slot_ids, lengths)
    positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], lengths)
    input_ids = slots.tokens[token_slots, positions].astype(np.int64)
    blocks, offsets = np.divmod(positions, slots.block_size)
    slot_mapping = slots.block_table[token_slots, blocks].astype(np.int64) * slots.block_size + offsets

    seq_lens = starts + lengths
    max_seq_len = int(seq_lens.max())
    sample_rows = [i for i, row in enumerate(rows) if row.sample]
    sample_indices = query_start_loc[1:][sample_rows] - 1
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        attention=AttentionBatch(
            query_start_loc=torch.from_numpy(query_start_loc.astype(np.int32)),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            block_table=torch.from_numpy(slots.block_table[slot_ids, : -(-max_seq_len // slots.block_size)]),
            slot_mapping=torch.from_numpy(slot_mapping),
            max_query_len=int(lengths.max()),
            max_seq_len=max_seq_len,
        ),
        sample_rows=sample_rows,
        sample_indices=torch.from_numpy(sample_indices),
        starts=query_start_loc[:-1].tolist(),
    )
