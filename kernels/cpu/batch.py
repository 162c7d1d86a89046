"""The batch of a stack's call, as the compiled library takes it."""

from __future__ import annotations

import ctypes

import torch

from pagewire.kernels.paging import AttentionBatch


def set_batch(attention: ctypes.Structure, batch: AttentionBatch, num_tokens: int) -> int:
    """Point an `AttentionCall` to a batch of `num_tokens` tokens; returns the address of its slots.

    Raises:
        ValueError: a tensor has another shape or dtype, or is not contiguous.
    """
    starts, lens = batch.query_start_loc, batch.seq_lens
    table, slots = batch.block_table, batch.slot_mapping
    if (
        any(tensor.dtype != torch.int32 or not tensor.is_contiguous() for tensor in (starts, lens, table))
        or slots.dtype != torch.int64
        or slots.shape != (num_tokens,)
        or not slots.is_contiguous()
        or len(starts) != len(lens) + 1
        or len(table) < len(lens)
    ):
        raise ValueError(f"the batch does not fit {num_tokens} tokens")
    attention.query_start_loc, attention.seq_lens = starts.data_ptr(), lens.data_ptr()
    attention.block_table, attention.block_table_stride = table.data_ptr(), table.stride(0)
    attention.num_tokens, attention.num_requests = num_tokens, len(lens)
    attention.max_blocks = table.shape[1]
    attention.num_threads = torch.get_num_threads()
    return slots.data_ptr()
