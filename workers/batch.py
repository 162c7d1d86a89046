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

MIN_ROWS = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step runs: T tokens of R requests, in the order of the rows, then padding (see `padded_size`)."""

    input_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]."""
    attention: AttentionBatch
    sample_rows: list[int]
    """Rows of the plan that sample."""
    sample_indices: Tensor
    """int64 [padded_size of their number]: the last token of each of them, then zeros."""
    starts: list[int]
    """Where each row's tokens begin in the batch."""


def padded_size(num_rows: int) -> int:
    """How many rows are multiplied for so many: at most a sixteenth more, in 16 sizes between powers of two.

    oneDNN prepares a product for each number of rows, which takes milliseconds and up to a megabyte. A lone row
    becomes two: products of one row are computed in another order than those of many, and a token's logits
    must not depend on the batch.
    """
    grain = 1 << max(0, num_rows.bit_length() - 5)
    return max(MIN_ROWS, -(-num_rows // grain) * grain)


def build_batch(rows: Sequence[Row], slots: Slots) -> Batch:
    """The batch for `rows`, after `slots.apply`."""
    slot_ids = np.array([row.slot for row in rows], np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    lengths = np.array([row.num_tokens for row in rows], np.int64)
    query_start_loc = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])

    size = padded_size(num_tokens)
    input_ids, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
    slot_mapping = np.full(size, -1, np.int64)
    token_slots = np.repeat(slot_ids, lengths)
    places = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], lengths)
    positions[:num_tokens] = places
    input_ids[:num_tokens] = slots.tokens[token_slots, places]
    blocks, offsets = np.divmod(places, slots.block_size)
    slot_mapping[:num_tokens] = slots.block_table[token_slots, blocks] * slots.block_size + offsets

    seq_lens = starts + lengths
    max_seq_len = int(seq_lens.max())
    sample_rows = [i for i, row in enumerate(rows) if row.sample]
    sample_indices = np.zeros(padded_size(len(sample_rows)), np.int64)
    sample_indices[: len(sample_rows)] = query_start_loc[1:][sample_rows] - 1
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
