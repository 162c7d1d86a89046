"""Attention over the paged KV cache: one signature for every device."""

from torch import Tensor

from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.paging import (
    CAUSAL,
    UNSCALED,
    WHOLE,
    AttentionBatch,
    Cache,
    KVScales,
    LogitTerms,
    kv_block_bytes,
    token_view,
)

__all__ = [
    "CAUSAL",
    "UNSCALED",
    "WHOLE",
    "AttentionBatch",
    "Cache",
    "KVScales",
    "LogitTerms",
    "kv_block_bytes",
    "paged_attention",
    "store_kv",
    "token_view",
]


def paged_attention(
    q: Tensor,
    cache: Cache,
    batch: AttentionBatch,
    scale: float,
    terms: LogitTerms = CAUSAL,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every query token to its own request's keys and values: causal unless `terms` says otherwise.

    Query i of a request with `query_len` tokens sits at position `seq_len - query_len + i`. The bits of a token's
    output depend on its request alone, not on the batch, the chunking or the threads.

    Args:
        q: [T, Hq, D], any strides as long as D is contiguous.
        cache: of the layer; Hq is a multiple of Hkv. On the CPU it may be of int8.
        batch: which rows of q belong to which request.
        scale: factor of the dot products, usually D ** -0.5.
        terms: which keys are seen, and what changes the logits.
        out: [T, Hq, Dv], contiguous, in q's dtype; made if not given.

    Returns:
        out: [T, Hq, Dv] in q's dtype. Padding rows are 0.

    Raises:
        NotImplementedError: the device is not served.
        TypeError: an index tensor of the batch is not int32.
        ValueError: shapes disagree, the batch points outside its tensors, or the cache takes no scales.
    """
    return implementation_for(q, cache.k, cache.v).paged_attention(q, cache, batch, scale, terms, out)


def store_kv(k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
    """Writes keys and values into their slots of the cache.

    Args:
        k: [T, Hkv, D] in the cache's dtype; may be a strided view. For a cache of 8 bits, of the model's dtype.
        v: [T, Hkv, Dv], likewise.
        cache: as for `paged_attention`.
        slot_mapping: int64 [T], `block * block_size + row`; -1 stores nothing.

    Raises:
        NotImplementedError: the device is not served.
        ValueError: the cache takes no scales.
        IndexError: a slot lies outside the cache.
    """
    implementation_for(k, v, cache.k, cache.v).store_kv(k, v, cache, slot_mapping)
