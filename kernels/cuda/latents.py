"""Attention to latents on a GPU: one KV head, whose values are the first elements of its keys. See `Kernels`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.kernels.cuda.attention import (
    BLOCK_SIZES,
    DTYPES,
    PARTS,
    TILE_ROWS,
    Instance,
    Workspace,
    check_batch,
    check_terms,
    choose_splits,
    common_fields,
    launch_instance,
    most_keys,
)
from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.limits import LATENTS, most_shared_bytes
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.data.paging import CAUSAL, AttentionBatch, Cache, LogitTerms

__all__ = ["LATENTS", "METHOD", "attend", "variants", "write"]

METHOD = "latents"
"""Stands for these kernels among the methods of trials; without them latents are expanded."""
THREADS = 128
"""Of a block that writes or merges."""


class Tiling(NamedTuple):
    """The rows and keys of a step of a block, and its warps. resident: blocks of a multiprocessor of sm_90."""

    rows: int
    keys: int
    warps: int
    resident: int


FEW = Tiling(16, 32, 4, 2)
"""For requests of at most 16 rows: single tokens of 16 query heads."""
MANY = (Tiling(64, 64, 8, 1), Tiling(64, 32, 8, 1), FEW)
"""For all others the first that fits into the device's shared memory: the cache is read for many rows at once."""


@functools.cache
def instance(dtype: torch.dtype, size: int, tiling: Tiling, *, chosen: bool = False) -> Instance:
    """The kernel for latents of `size` elements with the rotated ones.

    chosen: a token sees the keys of a list alone, so a block has rows of one token.
    """
    rank = LATENTS[size]
    rows, keys, warps, _ = tiling
    numbers = f"{rank}, {size - rank}, {rows}, {keys}, {warps}"
    row_bytes, groups = size * dtype.itemsize, warps * TILE_ROWS // rows
    shared = (rows + 2 * keys) * row_bytes + rows * keys * dtype.itemsize + (groups + 1) * rows * 4
    variant = Variant(
        "latent_attention.cu",
        f"latent_attention<{DTYPES[dtype]}, {numbers}{', true' if chosen else ''}>",
        "AttentionParameters",
    )
    return Instance(variant, 32 * warps, shared, rows)


@functools.cache
def merging(dtype: torch.dtype, size: int, tiling: Tiling, *, chosen: bool = False) -> Instance:
    """The kernel that merges the parts of split keys."""
    numbers = f"{LATENTS[size]}, {tiling.rows}, {tiling.keys}{', true' if chosen else ''}"
    name = f"merge_latents<{DTYPES[dtype]}, {numbers}>"
    return Instance(Variant("merge_latents.cu", name, "AttentionParameters"), THREADS, 0, tiling.rows)


@functools.cache
def writing(dtype: torch.dtype) -> Variant:
    """The kernel that writes latents into their cache."""
    return Variant("kv.cu", f"write_latents<{DTYPES[dtype]}>", "WriteLatents")


@functools.cache
def many(capability: tuple[int, int], dtype: torch.dtype, size: int) -> Tiling:
    """Of `MANY`, that of a device."""
    most = most_shared_bytes(capability)
    return next(tiling for tiling in MANY if instance(dtype, size, tiling).shared_bytes <= most)


def variants() -> list[Variant]:
    """The kernels for each dtype and size, on every device."""
    return [
        *(writing(dtype) for dtype in DTYPES),
        *(
            kernel(dtype, size, tiling, chosen=chosen).variant
            for kernel in (instance, merging)
            for chosen in (False, True)
            for dtype in DTYPES
            for size in sorted(LATENTS)
            for tiling in reversed(MANY)
        ),
    ]


def variants_of(
    capability: tuple[int, int], dtype: torch.dtype, size: int, *, indexed: bool = False
) -> list[Variant]:
    """The kernels that a model with latents of this size may launch on a device.

    indexed: it has layers with an indexer, which also see all keys where a request has no more than it chooses.
    """
    tilings: Iterable[Tiling] = dict.fromkeys((FEW, many(capability, dtype, size)))
    attending = [
        kernel(dtype, size, tiling, chosen=chosen).variant
        for chosen in ((False, True) if indexed else (False,))
        for tiling in tilings
        for kernel in (instance, merging)
    ]
    return [writing(dtype), *attending]


def write(launcher: KernelLauncher, latents: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
    """Write rows of latents into a cache that has its values in its keys.

    Args:
        latents: [T, 1, size], bfloat16 or float16, rows contiguous and multiples of 16 bytes apart.
        cache: of latents' dtype, contiguous, in pages (`layout.py`).
        slot_mapping: int64 [T], contiguous, `block * block_size + row` inside the cache; -1 writes nothing.

    Raises:
        TypeError: no kernel supports a dtype.
        ValueError: shapes disagree, or a tensor is not aligned.
    """
    pages = cache.k
    if latents.dtype not in DTYPES or pages.dtype != latents.dtype or slot_mapping.dtype != torch.int64:
        raise TypeError(
            f"latents: no kernel writes {latents.dtype} to {pages.dtype} at slots of {slot_mapping.dtype}"
        )
    tokens, heads, size = latents.shape
    if pages.shape[1] != heads or heads != 1 or pages.shape[3] != size or slot_mapping.shape != (tokens,):
        raise ValueError(
            f"latents: shapes disagree: {tuple(latents.shape)}, cache {tuple(pages.shape)}, "
            f"slots {tuple(slot_mapping.shape)}"
        )
    aligned = size % 8 == 0 and latents.stride(2) == 1 and latents.stride(0) % 8 == 0
    if not aligned or latents.data_ptr() % 16 or pages.data_ptr() % 16:
        raise ValueError("latents: rows must be contiguous, and lie multiples of 16 bytes apart")
    if not (pages.is_contiguous() and slot_mapping.is_contiguous()):
        raise ValueError("latents: cache and slots must be contiguous")
    if tokens == 0:
        return
    kernel = writing(latents.dtype)
    fields = {"rows": latents, "cache": pages, "slots": slot_mapping, "token_stride": latents.stride(0)}
    fields |= {"num_tokens": tokens, "size": size, "block_size": pages.shape[2]}
    blocks = -(-tokens * (size // 8) // THREADS)
    launcher.launch(kernel, (blocks,), (THREADS,), pack(kernel, **fields))


def why_not(q: Tensor, cache: Cache, terms: LogitTerms) -> str | None:
    """Why no kernel attends with these queries [T, Hq, size] and terms; None if one does."""
    sizes = cache.k.shape[1:]
    if terms.chosen is not None and (terms.window is not None or terms.chunk is not None):
        return "no kernel for windows or chunks of keys that are chosen for each token; CPUs serve them"
    if replace(terms, chosen=None, sinks=None) != LogitTerms(window=terms.window, chunk=terms.chunk):
        return (
            "no kernel for what changes logits, but for windows, chunks and sinks; CPUs serve it, and so does "
            "float32"
        )
    if sizes[0] != 1 or sizes[1] not in BLOCK_SIZES or LATENTS.get(sizes[2]) != cache.v.shape[3]:
        return f"no kernel for K {tuple(cache.k.shape)} with values of {cache.v.shape[3]}"
    if q.shape[2] != sizes[2]:
        return f"no kernel for q {tuple(q.shape)} over K {tuple(cache.k.shape)}"
    return None


def attend(
    launcher: KernelLauncher,
    workspace: Workspace,
    q: Tensor,
    cache: Cache,
    batch: AttentionBatch,
    scale: float,
    terms: LogitTerms = CAUSAL,
    out: Tensor | None = None,
) -> Tensor:
    """See `Kernels.paged_attention`, for a cache with its values in its keys, and `attention.paged_attention`.

    The padded batch decides where sums are split, so the last bits of a token's output depend on the batch.

    Args:
        q: [T, Hq, size], bfloat16 or float16, aligned to 16 bytes, strides multiples of 8.
        cache: of one KV head, of q's dtype, of a size in `LATENTS`.
        scale: above 0.
        terms: sinks, and a window and a chunk, or chosen keys. sinks: float32 or of q's dtype. chosen: contiguous;
            no key is twice in a list.

    Raises:
        TypeError: no kernel supports a dtype.
        ValueError: shapes disagree, or no kernel supports them or the terms.
    """
    if q.dtype not in DTYPES or cache.k.dtype != q.dtype:
        raise TypeError(
            f"attention to latents: no kernel for queries of {q.dtype} and latents of {cache.k.dtype}"
        )
    if (reason := why_not(q, cache, terms)) is not None:
        raise ValueError(f"attention to latents: {reason}")
    tokens, heads, size = q.shape
    if out is None:
        out = torch.empty(tokens, heads, LATENTS[size], dtype=q.dtype, device=q.device)
    if out.shape != (tokens, heads, LATENTS[size]):
        raise ValueError("attention to latents: out must be as long as values")
    check_batch(q, cache, batch, out)
    check_terms(q, scale, terms)
    if (chosen := terms.chosen) is not None and not (
        chosen.dtype == torch.int32 and chosen.shape[:-1] == (tokens,) and chosen.is_contiguous()
    ):
        raise ValueError(
            f"attention to latents: chosen keys of {tokens} tokens are {chosen.dtype} {tuple(chosen.shape)}"
        )
    if tokens == 0:
        return out
    if len(batch.seq_lens) == 0:
        return out.zero_()
    longest_query = heads * (batch.max_query_len if chosen is None else 1)  # rows
    tiling = FEW if longest_query <= FEW.rows else many(launcher.capability, q.dtype, size)
    tiles, splits = _grid(launcher, workspace, q, batch, terms, tiling)
    fields = common_fields(workspace, q, cache, batch, out, terms) | {"scale": scale, "splits": splits}
    kernel = (q.dtype, size, tiling)
    launch_instance(launcher, instance(*kernel, chosen=chosen is not None), (tiles, splits), fields)
    if splits > 1:
        launch_instance(launcher, merging(*kernel, chosen=chosen is not None), (tiles, tiling.rows), fields)
    return out


def _grid(
    launcher: KernelLauncher,
    workspace: Workspace,
    q: Tensor,
    batch: AttentionBatch,
    terms: LogitTerms,
    tiling: Tiling,
) -> tuple[int, int]:
    """The number of tiles of a padded batch, and that of the parts into which the keys of each are split."""
    tokens, heads, size = q.shape
    requests = len(batch.seq_lens)
    if terms.chosen is None:
        longest = min(batch.max_seq_len, most_keys(terms) + batch.max_query_len)
        tiles = tokens * heads // tiling.rows + requests + 1  # see prefill.cuh
        used = min(tiles, requests * -(-batch.max_query_len * heads // tiling.rows))
    else:
        longest = min(batch.max_seq_len, terms.chosen.shape[1])
        tiles = used = tokens * -(-heads // tiling.rows)
    held = PARTS * launcher.multiprocessors * TILE_ROWS * workspace.outputs.shape[2]
    most = held // (tiling.rows * LATENTS[size]) // tiles
    splits = choose_splits(used, launcher.multiprocessors, longest, resident=tiling.resident, most=most)
    return tiles, splits
