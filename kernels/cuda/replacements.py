"""PyTorch in the place of CUDA kernels that a device gets wrong. Slow.

The functions have the names of the methods of `Kernels`. Those here read and write pages (`layout.py`), for which
they wait for the device; the others are those of `reference`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.paging import CAUSAL, AttentionBatch, Cache, LogitTerms


def replacement(method: str) -> Callable[..., Any]:
    """The function that computes a method of `Kernels` without a kernel."""
    function: Callable[..., Any] = getattr(sys.modules[__name__], method, None) or getattr(reference, method)
    return function


def paged_attention(
    q: Tensor,
    cache: Cache,
    batch: AttentionBatch,
    scale: float,
    terms: LogitTerms = CAUSAL,
    out: Tensor | None = None,
) -> Tensor:
    """See `pagewire.kernels.attention.paged_attention`."""
    table = batch.block_table.long().clamp(0, len(cache.k) - 1)  # entries that are never read may be anything
    blocks, places = torch.unique(table, return_inverse=True)
    batch = replace(batch, block_table=places.int())
    return reference.paged_attention(q, _rows(cache, blocks), batch, scale, terms, out)


def store_kv(k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
    """See `pagewire.kernels.attention.store_kv`."""
    block_size = cache.k.shape[2]
    blocks, places = torch.unique(slot_mapping.clamp_min(0) // block_size, return_inverse=True)
    slots = torch.where(slot_mapping < 0, -1, places * block_size + slot_mapping % block_size)
    rows = _rows(cache, blocks)
    reference.store_kv(k, v, rows, slots)
    for pages, stored in ((cache.k, rows.k), (cache.v, rows.v)):
        pages.view(torch.uint8)[blocks] = exchange_chunks(stored).view(torch.uint8)


rms_norm, rotary = reference.rms_norm, reference.rotary
rotate_and_store = partial(reference.rotate_and_store_with, sys.modules[__name__])


def _rows(cache: Cache, blocks: Tensor) -> Cache:
    """A copy of some blocks of a cache as the reference keeps them, in rows."""
    k, v = (
        exchange_chunks(pages.view(torch.uint8)[blocks].view(pages.dtype)) for pages in (cache.k, cache.v)
    )
    return replace(cache, k=k, v=v)
