"""Random paged batches, and the dense attention they stand for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.data.kv_codes import row_width
from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.kernels.ops import store_kv
from pagewire.kernels.reference.kernels import reference

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Absolute, for outputs of about unit size: two or three units in the last place."""


def allocate_kv(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> Cache:
    """The cache of one layer, zeroed."""
    sizes = (
        (num_blocks, num_kv_heads, block_size, row_width(size, dtype)) for size in (head_dim, v_head_dim)
    )
    return Cache(*(torch.zeros(size, dtype=dtype) for size in sizes))


@dataclass(frozen=True, slots=True)
class Shape:
    """Head counts and sizes of one attention layer."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int = 32
    block_size: int = 16
    values_in_keys: bool = False

    def allocate(self, num_blocks: int, dtype: torch.dtype) -> Cache:
        """A cache of this shape, zeroed."""
        sizes = (self.num_kv_heads, self.block_size, self.head_dim, self.v_head_dim)
        cache = allocate_kv(num_blocks, *sizes, dtype)
        return Cache.of_keys(cache.k, self.v_head_dim) if self.values_in_keys else cache


@dataclass(frozen=True, slots=True)
class Request:
    """The whole sequence of one request; the last `query_len` tokens are this step's."""

    q: Tensor  # [L, Hq, D]
    k: Tensor  # [L, Hkv, D]
    v: Tensor  # [L, Hkv, Dv]


@dataclass(frozen=True, slots=True)
class Paged:
    """Arguments of `paged_attention`, and the cache as the reference keeps it."""

    q: Tensor
    cache: Cache
    batch: AttentionBatch
    plain: Cache


def random_request(shape: Shape, length: int, dtype: torch.dtype, seed: int) -> Request:
    generator = torch.Generator().manual_seed(seed)

    def randn(num_heads: int, size: int) -> Tensor:
        return torch.randn(length, num_heads, size, generator=generator, dtype=torch.float64).to(dtype)

    q, k = randn(shape.num_heads, shape.head_dim), randn(shape.num_kv_heads, shape.head_dim)
    in_keys = shape.values_in_keys
    return Request(
        q, k, k[..., : shape.v_head_dim] if in_keys else randn(shape.num_kv_heads, shape.v_head_dim)
    )


def page(
    shape: Shape,
    requests: list[Request],
    spans: list[tuple[int, int]],
    *,
    padding: int = 0,
    seed: int = 0,
    store: Callable[[Tensor, Tensor, Cache, Tensor], None] = store_kv,
    cache_dtype: torch.dtype | None = None,
) -> Paged:
    """Request i's tokens `spans[i][0]` to `spans[i][1]` as one step, those before them already in the cache.

    `store` writes the cache, in the layout of the kernels that will read it; it is of the requests' dtype, or
    of `cache_dtype`. Whatever no token was written to holds NaN (of codes: scales of NaN): rest of the last pages,
    pages of nobody, unused table entries.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = requests[0].q.dtype
    ends = [end for _, end in spans]
    counts = [-(-end // shape.block_size) for end in ends]
    num_blocks, max_blocks = sum(counts) + 3, max([1, *counts]) + 2
    cache, plain = (shape.allocate(num_blocks, cache_dtype or dtype) for _ in range(2))
    for x in (cache.k, cache.v, plain.k, plain.v):
        if x.is_floating_point():
            x.fill_(torch.nan)
        else:
            x.view(torch.int8).fill_(-1)
    free = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    block_table = torch.full((len(spans), max_blocks), 2**30, dtype=torch.int32)
    slot_mapping: list[Tensor] = []
    for i, (request, (begin, end)) in enumerate(zip(requests, spans, strict=True)):
        blocks, free = free[: counts[i]], free[counts[i] :]
        block_table[i, : counts[i]] = blocks
        positions = torch.arange(end)
        slots = blocks[positions // shape.block_size].long() * shape.block_size + positions % shape.block_size
        store(request.k[:end], request.v[:end], cache, slots)
        reference.store_kv(request.k[:end], request.v[:end], plain, slots)
        slot_mapping.append(slots[begin:])
    lengths = torch.tensor([0] + [end - begin for begin, end in spans])
    q = torch.cat([request.q[begin:end] for request, (begin, end) in zip(requests, spans, strict=True)])
    q = torch.cat([q, torch.full((padding, *q.shape[1:]), torch.nan, dtype=dtype)])
    batch = AttentionBatch(
        query_start_loc=lengths.cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.cat([*slot_mapping, torch.full((padding,), -1)]),
        max_query_len=int(lengths.max()),
        max_seq_len=max(ends),
    )
    return Paged(q, cache, batch, plain)
