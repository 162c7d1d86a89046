"""The attention of attention.cpp, and what it reads: keys and values in a paged cache."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import AttentionCall
from pagewire.kernels.cpu.tensors import (
    CACHE_DTYPES,
    DTYPES,
    cache_fields,
    check_cache,
    last_contiguous,
    logit_terms,
)
from pagewire.kernels.data.kv_codes import CODES, head_size, row_width
from pagewire.kernels.data.paging import AttentionBatch, Cache, LogitTerms, check_scales


def paged_attention(
    library: ctypes.CDLL,
    q: Tensor,
    cache: Cache,
    batch: AttentionBatch,
    scale: float,
    terms: LogitTerms,
    out: Tensor | None,
) -> Tensor:
    """See `Kernels.paged_attention`."""
    check_scales(cache)
    num_tokens, num_heads, head_dim = q.shape
    q = last_contiguous(q)
    if out is None:
        out = q.new_empty(num_tokens, num_heads, head_size(cache.v))
    _check(q, cache, batch, out)
    query_start_loc, seq_lens = batch.query_start_loc.contiguous(), batch.seq_lens.contiguous()
    block_table = last_contiguous(batch.block_table)
    whole = None if batch.whole is None else batch.whole.contiguous()
    native, owners = logit_terms(terms, num_heads, num_tokens)
    call = AttentionCall(
        q=q.data_ptr(),
        out=out.data_ptr(),
        query_start_loc=query_start_loc.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        block_table=block_table.data_ptr(),
        whole=None if whole is None else whole.data_ptr(),
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        **cache_fields(library, cache),
        block_table_stride=block_table.stride(0),
        num_tokens=num_tokens,
        num_requests=len(seq_lens),
        num_heads=num_heads,
        head_dim=head_dim,
        max_blocks=block_table.shape[1],
        terms=native,
        scale=scale,
        dtype=DTYPES[q.dtype],
        num_threads=torch.get_num_threads(),
    )
    failed = library.pagewire_attention(ctypes.byref(call))
    del owners
    if failed:
        raise ValueError("paged_attention: lengths or block numbers of the batch do not fit its tensors")
    return out


def store_kv(library: ctypes.CDLL, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
    """See `Kernels.store_kv`."""
    check_scales(cache)
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slots are int64, not {slot_mapping.dtype}")
    slots = slot_mapping.contiguous()
    for is_value, (source, stored) in enumerate(zip((k, v), cache.tensors, strict=False)):
        source = last_contiguous(source)
        num_tokens, num_heads, size = source.shape
        num_blocks, _, block_size, _ = stored.shape
        if stored.shape[1] != num_heads or head_size(stored) != size:
            raise ValueError(f"store_kv: {tuple(source.shape)} into {tuple(stored.shape)}")
        if len(slots) != num_tokens:
            raise ValueError(f"store_kv: {len(slots)} slots for {num_tokens} tokens")
        if stored.dtype not in (source.dtype, *CODES):
            raise TypeError(f"store_kv: {source.dtype} into {stored.dtype}")
        check_cache(library, stored)
        outside = library.pagewire_store(
            source.data_ptr(),
            stored.data_ptr(),
            slots.data_ptr(),
            num_tokens,
            num_heads,
            size,
            source.stride(0),
            source.stride(1),
            stored.stride(0),
            stored.stride(1),
            num_blocks,
            block_size,
            is_value,
            DTYPES[source.dtype],
            CACHE_DTYPES[stored.dtype],
            torch.get_num_threads(),
        )
        if outside:
            raise IndexError("store_kv: a slot lies outside the cache")


def _check(q: Tensor, cache: Cache, batch: AttentionBatch, out: Tensor) -> None:
    num_tokens, num_heads, head_dim = q.shape
    k_cache, v_cache = cache.k, cache.v
    num_blocks, num_kv_heads, block_size, _ = v_cache.shape
    if k_cache.dtype not in (q.dtype, *CODES):
        raise TypeError(f"paged_attention: queries of {q.dtype}, keys of {k_cache.dtype}")
    for tensor in (batch.query_start_loc, batch.seq_lens, batch.block_table):
        if tensor.dtype != torch.int32:
            raise TypeError(f"lengths and block tables are int32, not {tensor.dtype}")
    if (
        k_cache.shape != (num_blocks, num_kv_heads, block_size, row_width(head_dim, k_cache.dtype))
        or num_heads % num_kv_heads != 0
        or out.shape != (num_tokens, num_heads, head_size(v_cache))
        or out.dtype != q.dtype
        or not out.is_contiguous()
        or len(batch.query_start_loc) != len(batch.seq_lens) + 1
        or len(batch.block_table) < len(batch.seq_lens)
    ):
        raise ValueError(
            f"paged_attention: shapes disagree: q {tuple(q.shape)}, K {tuple(k_cache.shape)}, "
            f"V {tuple(v_cache.shape)}, out {tuple(out.shape)}, block table {tuple(batch.block_table.shape)}"
        )
