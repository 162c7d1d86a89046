"""Attention in plain PyTorch, and what changes its logits before the softmax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data import kv_codes
from pagewire.kernels.data.elementwise import elementwise
from pagewire.kernels.data.paging import WHOLE, AttentionBatch, Cache, LogitTerms, check_scales, token_view

QUERIES, KEYS = 16, 256
"""Shape of every product in attention; tiles are counted from position 0."""


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which sums over x are computed: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _gather(cache: Tensor, blocks: Tensor, length: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    """The first `length` rows of a request, [num_heads, length, size]: KV heads repeated for their query heads."""
    tokens = token_view(cache)[blocks.long()].flatten(0, 1)[:length]
    tokens = kv_codes.dequantise(tokens, dtype) if cache.dtype in kv_codes.CODES else tokens.to(dtype)
    return tokens.transpose(0, 1).repeat_interleave(num_heads // cache.shape[1], dim=0)


def paged_attention(
    q: Tensor,
    cache: Cache,
    batch: AttentionBatch,
    scale: float,
    terms: LogitTerms,
    out: Tensor | None,
) -> Tensor:
    """See `Kernels.paged_attention`.

    PyTorch's products and sums may have other bits for other shapes. So all are of one shape, 16 queries by 256
    keys, with zeros where a request has none. On a GPU so small products take long; there an encoder's prompts are
    attended to at once, each by itself.
    """
    if batch.whole is not None:
        return _some_whole(q, cache, batch, scale, terms, out)
    at_once = terms.future > 0 and q.device.type != "cpu" and terms.softcap is None and terms.sinks is None
    check_scales(cache)
    dtype = accumulation_dtype(q)
    num_heads, block_size = q.shape[1], cache.k.shape[2]
    if out is None:
        out = q.new_empty(q.shape[0], num_heads, kv_codes.head_size(cache.v))
    out.zero_()
    starts = batch.query_start_loc.tolist()
    for request, seq_len in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        first = seq_len - (rows.stop - rows.start)
        if first == seq_len:
            continue
        blocks = batch.block_table[request, : -(-seq_len // block_size)]
        gathered = (_gather(x, blocks, seq_len, num_heads, dtype) for x in cache.tensors)
        scaled = [x if by == 1 else x * by for x, by in zip(gathered, cache.scales, strict=False)]
        k, v = scaled if len(scaled) > 1 else (scaled[0], scaled[0][..., : out.shape[2]].clone())
        # What no query sees may hold anything, and 0 x NaN is NaN.
        v[:, : int(terms.first_keys(torch.tensor(first)))] = 0
        if at_once:
            out[rows] = attend_at_once(q[rows].to(dtype), k, v, scale, terms).to(out.dtype)
            continue
        tiles = list(zip(_tiles(k), _tiles(v), strict=True))
        queries = q[rows].to(dtype).transpose(0, 1) * scale
        for begin in range(first // QUERIES * QUERIES, seq_len, QUERIES):
            start, stop = max(begin, first), min(begin + QUERIES, seq_len)
            block = _padded(queries[:, start - first : stop - first], QUERIES, start - begin)
            positions = torch.arange(begin, begin + QUERIES, device=q.device)[:, None]
            num_tiles = -(-min(stop + terms.future, seq_len) // KEYS)
            seen = None
            if terms.chosen is not None:
                own = terms.chosen[rows][start - first : stop - first].long()
                seen = torch.ones(QUERIES, max(num_tiles * KEYS, int(own.max()) + 1), dtype=torch.bool)
                seen[start - begin : stop - begin] = False
                seen[start - begin : stop - begin].scatter_(1, own, True)
            attended = _attend(block, tiles[:num_tiles], positions, seq_len, terms, seen)
            real = attended[:, start - begin : stop - begin].transpose(0, 1)
            out[rows][start - first : stop - first] = real.to(out.dtype)
    return out


def _some_whole(
    q: Tensor, cache: Cache, batch: AttentionBatch, scale: float, terms: LogitTerms, out: Tensor | None
) -> Tensor:
    """Attention of a batch in some of whose requests queries see all keys: once causal, once of these."""
    assert batch.whole is not None
    own = replace(batch, whole=None)
    causal = paged_attention(q, cache, own, scale, terms, out)
    whole = paged_attention(q, cache, own, scale, replace(terms, future=WHOLE), None)
    lengths = batch.query_start_loc.diff().long()
    rows = batch.whole.bool().repeat_interleave(lengths)
    return causal.copy_(torch.where(rows[:, None, None], whole[: len(rows)], causal[: len(rows)]))


def _attend(
    q: Tensor,
    tiles: list[tuple[Tensor, Tensor]],
    positions: Tensor,
    seq_len: int,
    terms: LogitTerms,
    seen: Tensor | None,
) -> Tensor:
    """The outputs [heads, QUERIES, Dv] of queries at positions [QUERIES, 1].

    tiles: keys and values, from 0 on. seen: [QUERIES, keys], which of them were chosen; None: all.
    """
    logits = []
    for i, (k, _) in enumerate(tiles):
        keys = torch.arange(i * KEYS, (i + 1) * KEYS, device=q.device)
        logits.append(apply_terms(terms, q @ k.transpose(1, 2), positions, keys, seq_len))
        if seen is not None:
            logits[-1] = logits[-1].masked_fill(~seen[:, i * KEYS : (i + 1) * KEYS], -torch.inf)
    largest_logit = torch.stack([tile.amax(-1, keepdim=True) for tile in logits]).amax(0)
    total = torch.zeros_like(largest_logit)
    if terms.sinks is not None:
        sinks = terms.sinks.to(q.dtype)[:, None, None]
        largest_logit = largest_logit.maximum(sinks)
        total = elementwise(torch.exp, sinks - largest_logit)
    attended = q.new_zeros(*q.shape[:2], tiles[0][1].shape[2])
    for tile, (_, v) in zip(logits, tiles, strict=True):
        probabilities = elementwise(torch.exp, tile - largest_logit)
        total = total + probabilities.sum(-1, keepdim=True)
        attended = attended + probabilities @ v
    return attended / total


def _tiles(x: Tensor) -> Iterator[Tensor]:
    """The rows of x [heads, n, D] as tensors [heads, KEYS, D], the last one with zeros behind them."""
    for start in range(0, x.shape[1], KEYS):
        yield _padded(x[:, start : start + KEYS], KEYS, 0)


def _padded(x: Tensor, size: int, before: int) -> Tensor:
    """A copy of x [heads, n, D] as [heads, size, D], with `before` zero rows before it, the others behind."""
    padded = x.new_zeros(x.shape[0], size, x.shape[2])
    padded[:, before : before + x.shape[1]] = x
    return padded


def _as_stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values as a cache of `dtype` holds them."""
    if dtype in kv_codes.CODES:
        return kv_codes.quantise(x, dtype)
    if dtype.itemsize > 1:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() * (1 / scale)).clamp(-largest, largest).to(dtype)


def store_kv(k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
    """See `Kernels.store_kv`."""
    check_scales(cache)
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored].long()
    blocks, offsets = slots // cache.k.shape[2], slots % cache.k.shape[2]
    for stored, rows, scale in zip(cache.tensors, (k, v), cache.scales, strict=False):
        token_view(stored)[blocks, offsets] = _as_stored(rows[is_stored], stored.dtype, scale)


def apply_terms(terms: LogitTerms, logits: Tensor, queries: Tensor, keys: Tensor, seq_len: int) -> Tensor:
    """Logits [heads, Q, K] of queries at positions [Q, 1] and keys at [K]; -inf where a key is hidden."""
    if terms.softcap:
        logits = terms.softcap * elementwise(torch.tanh, logits / terms.softcap)
    if terms.alibi is not None:
        logits = logits + terms.alibi.to(logits)[:, None, None] * (keys - queries)
    if terms.relative_bias is not None:
        logits = logits + _of_distances(terms.relative_bias, keys - queries, seq_len).to(logits)
    hidden = (keys < terms.first_keys(queries)) | (keys > queries + terms.future) | (keys >= seq_len)
    return logits.masked_fill(hidden, float("-inf"))


def _of_distances(table: Tensor, distances: Tensor, seq_len: int) -> Tensor:
    """Biases [heads, Q, K] of distances [Q, K]; the table [heads, 2 R] begins with that of -R."""
    radius = table.shape[1] // 2
    if seq_len > radius:
        raise ValueError(f"a bias of distances up to {radius} is too small for {seq_len} tokens")
    return table[:, (distances + radius).clamp(0, 2 * radius - 1)]


def attend_at_once(q: Tensor, k: Tensor, v: Tensor, scale: float, terms: LogitTerms) -> Tensor:
    """Attention of a request's last n tokens, by one call of PyTorch's own.

    Args:
        q: [n, heads, D].
        k: [heads, L, D], of all tokens.
        v: [heads, L, Dv], likewise.
        scale: of the dot products.
        terms: without softcap and sinks.

    Returns:
        [n, heads, Dv].
    """
    mask = _mask(terms, q, k.shape[1])
    attended = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=None if mask is None else mask[None],
        scale=scale,
    )
    return attended[0].transpose(0, 1)


def _mask(terms: LogitTerms, q: Tensor, seq_len: int) -> Tensor | None:
    """What is added to the logits of queries [n, heads, D]: [heads or 1, n, seq_len]; None: nothing is."""
    by_head = terms.alibi is not None or terms.relative_bias is not None
    if not by_head and terms.window is None and terms.chunk is None and terms.future >= seq_len:
        return None
    keys = torch.arange(seq_len, device=q.device)
    zeros = q.new_zeros(q.shape[1] if by_head else 1, len(q), seq_len)
    return apply_terms(terms, zeros, keys[seq_len - len(q) :, None], keys, seq_len)
