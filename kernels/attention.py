"""Attention over the paged KV cache: one signature for every device."""

from torch import Tensor

from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.paging import (
    UNSCALED,
    WHOLE,
    AttentionBatch,
    KVScales,
    kv_block_bytes,
    token_view,
)

__all__ = [
    "UNSCALED",
    "WHOLE",
    "AttentionBatch",
    "KVScales",
    "kv_block_bytes",
    "paged_attention",
    "store_kv",
    "token_view",
]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    window: int | None = None,
    future: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    scales: KVScales = UNSCALED,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every query token to its own request's keys and values: causal unless `future` is given.

    Query i of a request with `query_len` tokens sits at position `seq_len - query_len + i` and sees the keys at
    positions 0 to its own, and `future` keys after it, as far as the request has them. The logit of a key is
    `q . k * scale`, then softcapped, then biased by distance. The bits of a token's output depend on its request
    alone, not on the batch, the chunking or the threads.

    Args:
        q: [T, Hq, D], any strides as long as D is contiguous.
        k_cache: [num_blocks, Hkv, block_size, D]; Hq is a multiple of Hkv. On the CPU it may be of int8, with rows
            of `kv_codes.row_width`.
        v_cache: [num_blocks, Hkv, block_size, Dv], likewise.
        batch: which rows of q belong to which request.
        scale: factor of the dot products, usually D ** -0.5.
        window: how many keys up to its own a query sees, that included; None is all.
        future: how many keys after its own position a query sees; `WHOLE` is all, as in encoders.
        softcap: logits become `softcap * tanh(logit / softcap)`.
        sinks: [Hq], one more logit per head in the softmax's denominator, with no value.
        alibi: [Hq], slopes of the bias `slope * (key position - query position)`.
        relative_bias: [Hq, 2 R], the bias of distances from -R on: `[:, R + key position - query position]`. R is
            at least a request's length, rounded up to a multiple of 256.
        scales: of keys and values in caches of 8-bit floats.
        out: [T, Hq, Dv], contiguous, in q's dtype; made if not given.

    Returns:
        out: [T, Hq, Dv] in q's dtype. Padding rows are 0.

    Raises:
        NotImplementedError: the device is not served.
        TypeError: an index tensor of the batch is not int32.
        ValueError: shapes disagree, the batch points outside its tensors, or the caches take no scales.
    """
    kernels = implementation_for(q, k_cache, v_cache)
    return kernels.paged_attention(
        *(q, k_cache, v_cache, batch, scale),
        window=window,
        future=future,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        relative_bias=relative_bias,
        scales=scales,
        out=out,
    )


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scales: KVScales = UNSCALED,
) -> None:
    """Writes keys and values into their slots of the cache.

    Args:
        k: [T, Hkv, D] in the cache's dtype; may be a strided view. For a cache of 8 bits, of the model's dtype.
        v: [T, Hkv, Dv], likewise.
        k_cache: [num_blocks, Hkv, block_size, D], or as for `paged_attention`.
        v_cache: [num_blocks, Hkv, block_size, Dv], likewise.
        slot_mapping: int64 [T], `block * block_size + row`; -1 stores nothing.
        scales: of keys and values in caches of 8-bit floats.

    Raises:
        NotImplementedError: the device is not served.
        ValueError: the caches take no scales.
        IndexError: a slot lies outside the cache.
    """
    implementation_for(k, v, k_cache, v_cache).store_kv(k, v, k_cache, v_cache, slot_mapping, scales=scales)
