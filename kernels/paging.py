"""The paged KV cache: its layout, and the metadata of a batch that attention needs.

The layout, one pair of tensors per layer:

    K  [num_blocks, num_kv_heads, block_size, head_dim]
    V  [num_blocks, num_kv_heads, block_size, v_head_dim]

A cache of int8 has rows that are wider by a scale (`kv_codes.py`).

A request owns a list of blocks, its row of `block_table`. The token at position `p` of the request lies in block
`block_table[request, p // block_size]`, row `p % block_size`. Its *KV slot* is that place as a number,
`block * block_size + row`. Within one (block, head) all rows are contiguous, so a kernel streams a head's keys
without touching its neighbours'. Only this module knows the order of the axes. The order of elements within one
(block, head) is private to the kernels: the reference keeps rows, the compiled CPU kernels have an order of their
own (`cpu/layout.h`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.kernels.kv_codes import row_width

WHOLE = 1 << 30  # keys after its own position of a query that sees its whole request


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The tokens that a step computes for each request, and the places of their keys and values.

    R requests share T token rows. Request r's tokens are rows `query_start_loc[r]:query_start_loc[r + 1]`
    (possibly none): the last of its `seq_lens[r]` positions. T may exceed
    `query_start_loc[R]`: the rows beyond are padding, with KV slot -1.
    """

    query_start_loc: Tensor
    """int32 [R + 1], starts with 0 and never decreases."""
    seq_lens: Tensor
    """int32 [R]: tokens of each request in the KV cache, this step's included."""
    block_table: Tensor
    """int32 [R, max_blocks]; entries beyond a request's last block are never read."""
    slot_mapping: Tensor
    """int64 [T]: the KV slot of each token; -1 stores nothing."""
    max_query_len: int
    """The maximum number of tokens of a request in this step."""
    max_seq_len: int
    """The maximum number of tokens of a request in the cache."""


class KVScales(NamedTuple):
    """What the 8-bit floats in a layer's cache are multiplied by to give its keys and values.

    Other caches have no use for them: the model's own dtypes hold numbers as they are, int8 has scales in its rows.
    """

    k: float = 1.0
    v: float = 1.0


UNSCALED = KVScales()


def check_scales(cache_dtype: torch.dtype, scales: KVScales) -> None:
    """Refuse scales for a cache that takes none.

    Raises:
        ValueError: the cache is not of 8-bit floats, and a scale is not 1.
    """
    if scales != UNSCALED and not (cache_dtype.is_floating_point and cache_dtype.itemsize == 1):
        raise ValueError(f"a cache of {cache_dtype} takes no {scales}")


def kv_block_bytes(
    num_kv_heads: int, block_size: int, head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of a block in a layer, K and V together."""
    row = row_width(head_dim, dtype) + row_width(v_head_dim, dtype)
    return num_kv_heads * block_size * row * dtype.itemsize


def token_view(cache: Tensor) -> Tensor:
    """A K or V cache as [num_blocks, block_size, num_kv_heads, size]: tokens first. A view, nothing is copied."""
    return cache.transpose(1, 2)
