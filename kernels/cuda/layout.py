"""The layout of K and V in a page of a GPU's cache, in PyTorch; `layout.cuh` explains it."""

import torch
from torch import Tensor

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
