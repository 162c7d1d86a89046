"""The paged KV cache: its layout, and what attention needs to know about a batch that reads it.

The layout, one pair of tensors per layer:

    K  [num_blocks, num_kv_heads, block_size, head_dim]
    V  [num_blocks, num_kv_heads, block_size, v_head_dim]

A request owns a list of blocks, its row of `block_table`. The token at position `p` of the request lies in block
`block_table[request, p // block_size]`, row `p % block_size`. A *slot* names that place in one number,
`block * block_size + row`. Within one (block, head) all rows are contiguous, so a kernel streams a head's keys
without touching its neighbours'. Only this module knows the order of the axes. How elements lie within one
(block, head) is an affair of the kernels that write and read it: the reference keeps rows, the compiled kernels of
the CPU an order of their own (`cpu/layout.h`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which tokens a step computes, for which requests, and where their keys and values lie.

    R requests share T token rows. Request r's tokens are rows `query_start_loc[r]:query_start_loc[r + 1]`
    (possibly none), and they are the last ones of its `seq_lens[r]` positions. T may exceed
    `query_start_loc[R]`: the rows beyond are padding, with slot -1.
    """

    query_start_loc: Tensor
    """int32 [R + 1], starts with 0 and never decreases."""
    seq_lens: Tensor
    """int32 [R]: tokens of each request in the KV cache, this step's included."""
    block_table: Tensor
    """int32 [R, max_blocks]; entries beyond a request's last block are never read."""
    slot_mapping: Tensor
    """int64 [T]: where each token's key and value are stored; -1 stores nothing."""
    max_query_len: int
    """No request has more tokens in this step."""
    max_seq_len: int
    """No request has more tokens in the cache."""


def kv_block_bytes(
    num_kv_heads: int, block_size: int, head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes that one block takes in one layer, K and V together."""
    return num_kv_heads * block_size * (head_dim + v_head_dim) * dtype.itemsize


def token_view(cache: Tensor) -> Tensor:
    """A K or V cache as [num_blocks, block_size, num_kv_heads, size]: tokens first. A view, nothing is copied."""
    return cache.transpose(1, 2)
