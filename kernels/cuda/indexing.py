"""The scores of an indexer's keys on a GPU, without waiting for it. See `Kernels.index_scores`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pagewire.kernels.cuda.attention import DTYPES
from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.data.paging import AttentionBatch

METHOD = "index_scores"
SIZES = (64, 128)
"""Elements of the keys that have a kernel."""
TOKENS, KEYS, THREADS = 16, 128, 128
"""Of a block, as in index_scores.cu."""


@functools.cache
def variant(dtype: torch.dtype, size: int) -> Variant:
    """The kernel for keys of a size."""
    return Variant("index_scores.cu", f"index_scores<{DTYPES[dtype]}, {size}>", "IndexScores")


def variants() -> list[Variant]:
    """The kernel for each dtype and size."""
    return [variant(dtype, size) for dtype in DTYPES for size in SIZES]


def index_scores(
    launcher: KernelLauncher,
    q: Tensor,
    weights: Tensor,
    scale: float,
    index: Tensor,
    batch: AttentionBatch,
    rows: range,
) -> Tensor:
    """See `Kernels.index_scores`.

    Args:
        q: [T, heads, size], bfloat16 or float16, aligned to 16 bytes, strides multiples of 8.
        weights: float32 [T, heads].
        index: contiguous, of q's dtype, of a size in `SIZES`.

    Raises:
        TypeError: no kernel supports a dtype.
        ValueError: shapes disagree, or a tensor does not lie as it must.
    """
    tokens, heads, size = q.shape
    if q.dtype not in DTYPES or index.dtype != q.dtype or weights.dtype != torch.float32:
        raise TypeError(
            f"index scores: no kernel for {q.dtype}, {index.dtype} and weights of {weights.dtype}"
        )
    if size not in SIZES or index.shape[2] != size or weights.shape != (tokens, heads) or rows.stop > tokens:
        raise ValueError(
            f"index scores: no kernel for q {tuple(q.shape)}, keys {tuple(index.shape)} and weights "
            f"{tuple(weights.shape)}"
        )
    aligned = q.stride(2) == 1 and not q.stride(0) % 8 and not q.stride(1) % 8 and not q.data_ptr() % 16
    if not aligned or index.data_ptr() % 16 or not (index.is_contiguous() and weights.is_contiguous()):
        raise ValueError("index scores: rows must be contiguous, and lie multiples of 16 bytes apart")
    scores = torch.full((len(rows), batch.max_seq_len), -torch.inf, device=q.device)
    if len(rows) == 0 or len(batch.seq_lens) == 0:
        return scores
    kernel = variant(q.dtype, size)
    fields = {
        "scores": scores,
        "q": q,
        "weights": weights,
        "keys": index,
        "query_starts": batch.query_start_loc,
        "lengths": batch.seq_lens,
        "block_table": batch.block_table,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "first": rows.start,
        "last": rows.stop,
        "requests": len(batch.seq_lens),
        "heads": heads,
        "block_shift": index.shape[1].bit_length() - 1,
        "table_width": batch.block_table.stride(0),
        "width": scores.shape[1],
        "scale": scale,
    }
    grid = (-(-scores.shape[1] // KEYS), -(-len(rows) // TOKENS))
    shared = (KEYS + -(-heads // 16) * 16) * size * q.dtype.itemsize
    launcher.launch(kernel, grid, (THREADS,), pack(kernel, **fields), shared)
    return scores
