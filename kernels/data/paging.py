"""The paged KV cache: its layout, and what attention over it takes beside queries.

The layout, one pair of tensors per layer:

    K  [num_blocks, num_kv_heads, block_size, head_dim]
    V  [num_blocks, num_kv_heads, block_size, v_head_dim]

A cache of codes has rows with scales in them (`kv_codes.py`). Where values are the first elements of their
keys, as in multi-head latent attention, there is one tensor: V is a view of K.

A request owns a list of blocks, its row of `block_table`. The token at position `p` of the request lies in block
`block_table[request, p // block_size]`, row `p % block_size`. Its *KV slot* is that place as a number,
`block * block_size + row`. Within one (block, head) all rows are contiguous, so a kernel streams a head's keys
without touching its neighbours'. Only this module knows the order of the axes. The order of elements within one
(block, head) is private to the kernels: the reference keeps rows, the compiled CPU kernels have an order of their
own (`cpu/layout.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.kernels.data.kv_codes import head_size, row_width

WHOLE = 1 << 30
"""`LogitTerms.future` of a query that sees its whole request."""


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
    whole: Tensor | None = None
    """int32 [R]: not 0 where queries see all keys of their request, those after their own as well, such as the
    parts of a picture in Gemma 3; None: none do. For kernels of the CPU."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Its tensors, in the order that `with_tensors` takes."""
        return self.query_start_loc, self.seq_lens, self.block_table, self.slot_mapping

    def with_tensors(self, tensors: Sequence[Tensor]) -> AttentionBatch:
        """The batch with other tensors, such as their copies on a device."""
        starts, lens, table, slots = tensors
        return replace(self, query_start_loc=starts, seq_lens=lens, block_table=table, slot_mapping=slots)


class KVScales(NamedTuple):
    """What the 8-bit floats in a layer's cache are multiplied by to give its keys and values.

    Other caches have no use for them: the model's own dtypes hold numbers as they are, rows of codes have scales.
    """

    k: float = 1.0
    v: float = 1.0


UNSCALED = KVScales()


@dataclass(frozen=True)  # no slots: there are weak references to it
class Cache:
    """The keys and values of a layer, in the layout of the kernels that read and write them."""

    k: Tensor
    """[num_blocks, Hkv, block_size, D], or rows of codes, see `kv_codes.row_width`."""
    v: Tensor
    """[num_blocks, Hkv, block_size, Dv], likewise; of k's dtype."""
    scales: KVScales = UNSCALED
    """Of caches of 8-bit floats."""
    index: Tensor | None = None
    """[num_blocks, block_size, size]: keys of an indexer, which chooses the keys that a token sees; None: there is
    none."""

    @classmethod
    def of_keys(cls, k: Tensor, v_head_dim: int, scales: KVScales = UNSCALED) -> Cache:
        """A cache whose values are the first `v_head_dim` elements of its keys; in int8 with the keys' scales."""
        return cls(k, k[..., : row_width(v_head_dim, k.dtype)], scales)

    @property
    def value_size(self) -> int:
        """Elements of a head of values."""
        return head_size(self.v)

    @property
    def values_in_keys(self) -> bool:
        """True if values are the first elements of keys."""
        return self.k.data_ptr() == self.v.data_ptr()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of keys, and that of values if it is another."""
        return (self.k,) if self.values_in_keys else (self.k, self.v)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All memory."""
        return self.tensors if self.index is None else (*self.tensors, self.index)

    @property
    def nbytes(self) -> int:
        """Bytes of all memory."""
        return sum(tensor.nbytes for tensor in self.memory)


@dataclass(frozen=True, slots=True)
class LogitTerms:
    """Which keys a query sees, and what becomes of their logits `q . k * scale` before the softmax.

    A logit is softcapped first, then biased by distance.
    """

    window: int | None = None
    """How many keys up to its own a query sees, that included; None: all."""
    future: int = 0
    """How many keys after its own a query sees; `WHOLE`: all, as in encoders."""
    softcap: float | None = None
    """Logits become `softcap * tanh(logit / softcap)`."""
    sinks: Tensor | None = None
    """[Hq], one more logit per head in the softmax's denominator, with no value."""
    alibi: Tensor | None = None
    """[Hq], slopes of the bias `slope * (key position - query position)`."""
    relative_bias: Tensor | None = None
    """[Hq, 2 R], the bias of distances from -R on: `[:, R + key position - query position]`. R is at least a
    request's length, rounded up to a multiple of 256."""
    chosen: Tensor | None = None
    """int32 [T, C]: the positions, ascending, of the only keys that a token sees, as far as the other terms let it
    see them; None: it sees all of these."""
    chunk: int | None = None
    """A query sees no key before its own chunk, which begins at a multiple of this position; None: no chunks."""

    def first_keys(self, positions: Tensor) -> Tensor:
        """The first key that the query at each of these positions sees; of their shape."""
        first = torch.zeros_like(positions)
        if self.window is not None:
            first = (positions - self.window + 1).clamp_min(0)
        return first if self.chunk is None else first.maximum(positions // self.chunk * self.chunk)

    @classmethod
    def two_sided(cls, window: int | None = None, relative_bias: Tensor | None = None) -> LogitTerms:
        """Every key is seen, or those within a window to each side, the query's own among them."""
        return cls(window, WHOLE if window is None else window - 1, relative_bias=relative_bias)


CAUSAL = LogitTerms()
"""A query sees the keys up to its own."""


def check_scales(cache: Cache) -> None:
    """Refuse scales for a cache that takes none.

    Raises:
        ValueError: the cache is not of 8-bit floats, and a scale is not 1.
    """
    dtype = cache.k.dtype
    if cache.scales != UNSCALED and not (dtype.is_floating_point and dtype.itemsize == 1):
        raise ValueError(f"a cache of {dtype} takes no {cache.scales}")


def kv_block_bytes(num_kv_heads: int, block_size: int, head_dims: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a block in a layer. head_dims: of keys, and of values if they have memory of their own."""
    row = sum(row_width(size, dtype) for size in head_dims)
    return num_kv_heads * block_size * row * dtype.itemsize


def token_view(cache: Tensor) -> Tensor:
    """A K or V cache as [num_blocks, block_size, num_kv_heads, size]: tokens first. A view, nothing is copied."""
    return cache.transpose(1, 2)
