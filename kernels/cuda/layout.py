"""Pages of a GPU's cache in PyTorch: their layout, and what stands in for CUDA kernels that work on them.

`layout.cuh` explains the layout. PyTorch comes in the place of kernels that a device gets wrong, or that there are
none of; it is mostly slow.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.paging import CAUSAL, AttentionBatch, Cache, LogitTerms
from pagewire.kernels.data.weight import Linear, UnpackedLinear, Weight, dense_weight
from pagewire.kernels.reference.kernels import Kernels

CHUNK_BYTES = 16


def swizzle(chunks: int, row: Tensor, chunk: Tensor) -> Tensor:
    """The place of `chunk` in `row`, in rows of `chunks` chunks of 16 bytes. Its own inverse."""
    p = min(chunks & -chunks, 8)
    return chunk ^ (row // (8 // p) & (p - 1))


def exchange_chunks(cache: Tensor) -> Tensor:
    """A copy of a K or V cache with its chunks exchanged: from rows to pages, or from pages to rows.

    Args:
        cache: [num_blocks, num_kv_heads, block_size, head_dim], contiguous.

    Raises:
        ValueError: a row is not a whole number of chunks.
    """
    blocks, heads, block_size, head_dim = cache.shape
    chunks, rest = divmod(head_dim * cache.dtype.itemsize, CHUNK_BYTES)
    if rest:
        raise ValueError(
            f"a row of {head_dim} elements of {cache.dtype} is not a multiple of {CHUNK_BYTES} bytes"
        )
    row = torch.arange(block_size, device=cache.device)[:, None]
    chunk = torch.arange(chunks, device=cache.device)
    source = (row * chunks + swizzle(chunks, row, chunk)).flatten()
    pages = cache.view(torch.uint8).view(blocks, heads, block_size * chunks, CHUNK_BYTES)
    return pages[:, :, source].view(cache.dtype).view(cache.shape)


class PagedReference(Kernels):
    """The reference on the pages of CUDA kernels, for which it waits for the device."""

    def paged_attention(
        self,
        q: Tensor,
        cache: Cache,
        batch: AttentionBatch,
        scale: float,
        terms: LogitTerms = CAUSAL,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels.paged_attention`."""
        table = batch.block_table.long().clamp(
            0, len(cache.k) - 1
        )  # entries that are never read may be anything
        blocks, places = torch.unique(table, return_inverse=True)
        batch = replace(batch, block_table=places.int())
        return super().paged_attention(q, _rows(cache, blocks), batch, scale, terms, out)

    def pack(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """See `pagewire.kernels.linear.pack`. The weight is made dense; a row's bits may depend on the batch.

        One that lies transposed, as some families' experts do, is laid in rows: experts.py reads it so.
        """
        return UnpackedLinear(functional.linear, dense_weight(weight.dense().contiguous()), bias)

    def store_kv(self, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
        """See `Kernels.store_kv`."""
        block_size = cache.k.shape[2]
        blocks, places = torch.unique(slot_mapping.clamp_min(0) // block_size, return_inverse=True)
        slots = torch.where(slot_mapping < 0, -1, places * block_size + slot_mapping % block_size)
        rows = _rows(cache, blocks)
        super().store_kv(k, v, rows, slots)
        for pages, stored in zip(cache.tensors, rows.tensors, strict=True):
            pages.view(torch.uint8)[blocks] = exchange_chunks(stored).view(torch.uint8)


def _rows(cache: Cache, blocks: Tensor) -> Cache:
    """A copy of some blocks of a cache as the reference keeps them, in rows."""
    rows = [exchange_chunks(pages.view(torch.uint8)[blocks].view(pages.dtype)) for pages in cache.tensors]
    if cache.values_in_keys:
        return Cache.of_keys(rows[0], cache.v.shape[3], cache.scales)
    return replace(cache, k=rows[0], v=rows[1])


REPLACEMENTS = PagedReference()
