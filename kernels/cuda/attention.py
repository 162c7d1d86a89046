"""Paged attention on a GPU: chooses the kernels for a batch and launches them. See `Kernels`."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cuda.launch import HOPPER, KernelLauncher, pack
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.data.paging import CAUSAL, WHOLE, AttentionBatch, Cache, LogitTerms, check_scales

__all__ = ["Workspace", "choose_splits", "paged_attention", "variants"]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
TWO_SIDED_HEAD_DIMS = tuple(size for size in HEAD_DIMS if size <= 128)
"""Of kernels that attend to later keys: no encoder has larger heads."""
WARPGROUP_HEAD_DIMS = tuple(size for size in HEAD_DIMS if size % 64 == 0)
"""Of the prefill kernels with the products of warpgroups."""
BLOCK_SIZES = (16, 32, 64)
TILE_ROWS = 16
"""Rows of a tile. A row is a query token of one query head; the query heads of a KV head share tiles."""
PARTS = 16
"""Partial results of tiles that the workspace can hold, per multiprocessor."""
RESIDENT = 2
"""Minimum number of decode blocks that a multiprocessor runs at once."""
PART_KEYS = 256
"""Minimum number of keys in a part (`LEAST_GROUPS` in decode_attention.cu)."""
NO_WINDOW = 2**30
STEP_KEYS = 128
"""Maximum number of keys in a step of prefill; a bias by distance is read for all of them."""
SPAN = 512
"""Keys whose sums are added up on their own where bits may not depend on the batch, as in span_attention.cu."""
WARPGROUPS = "warpgroup_attention"
"""The prefill kernels with the products of warpgroups; the others stand in for them."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Device memory for the partial results of decode attention, whose blocks each process a part of the keys.

    Allocated once; one launch at a time may use it.
    """

    outputs: Tensor
    """float32 [parts, 16, 256]."""
    sums: Tensor
    """float32 [parts, 16, 2]: the largest logit, and the sum of weights relative to it."""
    arrivals: Tensor
    """int32 [parts], all 0 while no kernel runs."""

    @classmethod
    def allocate(cls, multiprocessors: int, device: torch.device | str) -> "Workspace":
        """A workspace for a device with this many multiprocessors."""
        parts = PARTS * multiprocessors
        return cls(
            torch.empty(parts, TILE_ROWS, max(HEAD_DIMS), dtype=torch.float32, device=device),
            torch.empty(parts, TILE_ROWS, 2, dtype=torch.float32, device=device),
            torch.zeros(parts, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class Instance:
    """A variant and the shape of its launches."""

    variant: Variant
    threads: int
    shared_bytes: int
    rows: int
    """Rows per block."""


@functools.cache
def decode_instance(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> Instance:
    """The decode kernel. Its ring has at most 64 KB: three blocks fit an H200's multiprocessor, one an sm_89's."""
    step = 64 * head_dim  # 16 keys and values of a warp; 32 in fp8
    warps = 4 if head_dim <= 128 else 2
    stages = min(4, 65536 // (warps * step))
    numbers = f"{head_dim}, {warps}, {stages}"
    variant = _variant("decode_attention", dtype, cache_dtype, numbers)
    return Instance(variant, 32 * warps, 2 * TILE_ROWS * head_dim + warps * stages * step, TILE_ROWS)


@functools.cache
def prefill_instance(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, *, two_sided: bool = False
) -> Instance:
    """The prefill kernel. Registers limit rows and keys: an H200's multiprocessor runs two, an sm_89's one.

    two_sided: it attends to later keys, too.
    """
    tiles, keys = (2, 64) if head_dim <= 128 else (1, 32)
    step = 64 if head_dim <= 64 else 32
    numbers = f"{head_dim}, {tiles}, {keys}, {step}{', true' if two_sided else ''}"
    variant = _variant("prefill_attention", dtype, cache_dtype, numbers)
    rows, buffer = 4 * tiles * TILE_ROWS, 2 * keys * head_dim * cache_dtype.itemsize
    return Instance(variant, 128, rows * head_dim * dtype.itemsize + 2 * buffer + 128, rows)


@functools.cache
def span_instance(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> Instance:
    """The kernel whose bits do not depend on the batch. An sm_89's multiprocessor runs a block."""
    warps = 4 if head_dim <= 128 else 2
    keys = 32 if head_dim <= 128 or cache_dtype in FP8 else 16
    variant = _variant("span_attention", dtype, cache_dtype, f"{head_dim}, {warps}, {keys}")
    rows, buffers = warps * TILE_ROWS, 4 * keys * head_dim * cache_dtype.itemsize
    return Instance(variant, 32 * warps, rows * head_dim * (dtype.itemsize + 4) + buffers + 128, rows)


@functools.cache
def warpgroup_instance(dtype: torch.dtype, head_dim: int, *, two_sided: bool = False) -> Instance:
    """The prefill kernel of sm_90a, for caches of the queries' dtype. A multiprocessor runs one block."""
    keys = STEP_KEYS if head_dim <= 128 else 64
    variant = _variant(WARPGROUPS, dtype, None, f"{head_dim}, {keys}{', true' if two_sided else ''}")
    rows, row_bytes = 8 * TILE_ROWS, head_dim * dtype.itemsize
    shared = rows * row_bytes + 4 * keys * row_bytes + 256
    return Instance(replace(variant, needs="sm_90a"), 256, -(-shared // 1024) * 1024, rows)


def has_warpgroups(
    capability: tuple[int, int], dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int
) -> bool:
    """True if a device can run a prefill kernel with the products of warpgroups."""
    return capability == HOPPER and cache_dtype == dtype and head_dim in WARPGROUP_HEAD_DIMS


def _variant(kernel: str, dtype: torch.dtype, cache_dtype: torch.dtype | None, numbers: str) -> Variant:
    types = [DTYPES[dtype], *([] if cache_dtype is None else [(DTYPES | FP8)[cache_dtype]])]
    name = f"{kernel}<{', '.join(types)}, {numbers}>"
    return Variant(f"{kernel}.cu", name, "AttentionParameters")


def variants() -> list[Variant]:
    """The decode and the prefill kernels for each dtype, cache dtype and head size, and the two-sided ones."""
    causal = [
        instance(dtype, cache_dtype, head_dim).variant
        for instance in (decode_instance, prefill_instance, span_instance)
        for dtype in DTYPES
        for cache_dtype in (dtype, *FP8)
        for head_dim in HEAD_DIMS
    ]
    causal += [
        warpgroup_instance(dtype, head_dim).variant for dtype in DTYPES for head_dim in WARPGROUP_HEAD_DIMS
    ]
    return causal + [
        variant
        for dtype in DTYPES
        for size in TWO_SIDED_HEAD_DIMS
        for variant in two_sided_variants(dtype, size, warpgroups=size in WARPGROUP_HEAD_DIMS)
    ]


def causal_variants(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    *,
    invariant: bool = False,
) -> list[Variant]:
    """The kernels that a device runs for a head size of `HEAD_DIMS`."""
    kinds = (dtype, cache_dtype, head_dim)
    if invariant:
        return [span_instance(*kinds).variant]
    instances = [decode_instance(*kinds), prefill_instance(*kinds)]
    if has_warpgroups(capability, *kinds):
        instances.append(warpgroup_instance(dtype, head_dim))
    return [instance.variant for instance in instances]


def two_sided_variants(dtype: torch.dtype, head_dim: int, *, warpgroups: bool) -> list[Variant]:
    """The kernels that attend to later keys. warpgroups: also that with the products of warpgroups."""
    instances = [prefill_instance(dtype, dtype, head_dim, two_sided=True)]
    if warpgroups:
        instances.append(warpgroup_instance(dtype, head_dim, two_sided=True))
    return [instance.variant for instance in instances]


def choose_splits(
    tiles: int, multiprocessors: int, longest: int, *, resident: int = RESIDENT, most: int | None = None
) -> int:
    """The number of parts into which decode splits the keys of each tile.

    It depends only on the padded shape of the batch, so a recorded graph is valid for all lengths that it is
    replayed with. The result is the smallest number that keeps nearly all multiprocessors busy in the last round,
    because every part adds work to the merge.

    Args:
        tiles: number of tiles, of all requests and KV heads.
        multiprocessors: number of the device's multiprocessors.
        longest: number of keys of the longest request.
        resident: number of blocks that a multiprocessor runs at once.
        most: number of parts of a tile that the workspace can hold; None: of 16 rows and 256 elements.
    """
    slots = resident * multiprocessors
    most = min(-(-longest // PART_KEYS), PARTS * multiprocessors // tiles if most is None else most)
    busy = []
    for splits in range(1, max(most, 1) + 1):
        rounds = -(-tiles * splits // slots)
        busy.append(tiles * splits / (rounds * slots))
    return next(splits for splits, share in enumerate(busy, start=1) if share >= 0.9 * max(busy))


def paged_attention(
    launcher: KernelLauncher,
    workspace: Workspace,
    q: Tensor,
    cache: Cache,
    batch: AttentionBatch,
    scale: float,
    terms: LogitTerms = CAUSAL,
    out: Tensor | None = None,
    *,
    warpgroups: bool = True,
    invariant: bool = False,
) -> Tensor:
    """See `Kernels.paged_attention`; the cache has the layout of `layout.cuh`.

    Lengths, starts and block tables are on the device and are not checked. The padded batch decides where sums
    are split, so the last bits of a token's output depend on the batch, unless it is to be invariant; with `future`
    keys or a `relative_bias` nothing is split, and they depend on the request alone.

    Args:
        q: bfloat16 or float16, aligned to 16 bytes, strides multiples of 8.
        cache: K and V of one shape; of q's dtype, float8_e4m3fn or float8_e5m2.
        scale: above 0.
        terms: sinks and slopes are float32 or of q's dtype, biases by distance float32 and contiguous.
        warpgroups: the products of warpgroups may be used, where a device has them.
        invariant: a token's bits depend on the token and its keys alone, not on how its prompt was cut either.

    Raises:
        TypeError: no kernel supports a dtype.
        ValueError: shapes disagree, or no kernel supports them.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    check_scales(cache)
    if two_sided := terms.future != 0 or terms.relative_bias is not None:
        _check_two_sided(q, cache, batch, terms)
    _check(q, cache, batch, out)
    check_terms(q, scale, terms)
    if terms.chosen is not None:
        raise ValueError(
            "attention: no kernel for keys that are chosen for each token, but for some latents; CPUs serve them"
        )
    tokens, heads, head_dim = q.shape
    kv_heads = cache.k.shape[1]
    requests, group = len(batch.seq_lens), heads // kv_heads
    if tokens == 0:
        return out
    if requests == 0:
        return out.zero_()
    short_queries = 0 if two_sided else max(1, TILE_ROWS // group)  # decode has no two-sided kernel
    fields = common_fields(workspace, q, cache, batch, out, terms)
    fields |= {"scale": scale * cache.scales.k, "short_queries": short_queries}
    if invariant and not two_sided:
        _launch_spans(launcher, q, cache, batch, terms, fields | {"short_queries": 0})
        return out
    if two_sided or batch.max_query_len > short_queries:
        kinds = (q.dtype, cache.k.dtype, head_dim)
        if warpgroups and has_warpgroups(launcher.capability, *kinds):
            prefill = warpgroup_instance(q.dtype, head_dim, two_sided=two_sided)
        else:
            prefill = prefill_instance(*kinds, two_sided=two_sided)
        row_tiles = tokens * group // prefill.rows + requests + 1  # see prefill.cuh
        launch_instance(launcher, prefill, (row_tiles, kv_heads), fields)
    if short_queries and (batch.max_query_len <= short_queries or requests > 1):  # some may be short, too
        row_tiles = kv_heads * -(-short_queries * group // TILE_ROWS)
        longest = min(batch.max_seq_len, most_keys(terms) + short_queries)
        splits = choose_splits(requests * row_tiles, launcher.multiprocessors, longest)
        decode = decode_instance(q.dtype, cache.k.dtype, head_dim)
        launch_instance(launcher, decode, (splits, row_tiles, requests), fields)
    return out


def _launch_spans(
    launcher: KernelLauncher,
    q: Tensor,
    cache: Cache,
    batch: AttentionBatch,
    terms: LogitTerms,
    fields: dict[str, Any],
) -> None:
    """Launch the kernel whose bits do not depend on the batch. For few rows, spans have blocks of their own."""
    spans = span_instance(q.dtype, cache.k.dtype, q.shape[2])
    group, kv_heads = q.shape[1] // cache.k.shape[1], cache.k.shape[1]
    row_tiles = len(q) * group // spans.rows + len(batch.seq_lens) + 1  # see prefill.cuh
    most = -(-min(batch.max_seq_len, most_keys(terms) + batch.max_query_len + SPAN) // SPAN)
    fits = row_tiles * kv_heads * most <= PARTS * launcher.multiprocessors
    divided = batch.max_query_len * group <= TILE_ROWS and fits
    launch_instance(launcher, spans, (row_tiles, kv_heads, most if divided else 1), fields)


def most_keys(terms: LogitTerms) -> int:
    """The most keys up to its own that a query sees."""
    return min(terms.window or NO_WINDOW, terms.chunk or NO_WINDOW)


def common_fields(
    workspace: Workspace, q: Tensor, cache: Cache, batch: AttentionBatch, out: Tensor, terms: LogitTerms
) -> dict[str, Any]:
    """The fields of the kernels' struct, all but `scale`; no requests are short, and no keys of latents split."""
    return {
        "out": out,
        "q": q,
        "k": cache.k,
        "v": cache.v,
        "query_starts": batch.query_start_loc,
        "lengths": batch.seq_lens,
        "block_table": batch.block_table,
        "partial_out": workspace.outputs,
        "partial_sums": workspace.sums,
        "chosen": terms.chosen,
        "arrivals": workspace.arrivals,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "tokens": len(q),
        "requests": len(batch.seq_lens),
        "heads": q.shape[1],
        "kv_heads": cache.k.shape[1],
        "block_shift": cache.k.shape[2].bit_length() - 1,
        "table_width": batch.block_table.stride(0),
        "v_scale": cache.scales.v,
        "short_queries": 0,
        "num_chosen": 0 if terms.chosen is None else terms.chosen.shape[1],
        "splits": 1,
        **_term_fields(terms),
    }


def _term_fields(terms: LogitTerms) -> dict[str, Any]:
    """The fields of the kernels' struct for what changes the logits."""
    sinks, alibi = terms.sinks, terms.alibi
    return {
        "window": terms.window or NO_WINDOW,
        "chunk": terms.chunk or 0,
        "future": terms.future,
        "softcap": terms.softcap or 0.0,
        "relative_bias": terms.relative_bias,
        "bias_radius": _radius(terms.relative_bias),
        "sinks": sinks,
        "alibi": alibi,
        "sinks_are_float": sinks is not None and sinks.dtype == torch.float32,
        "alibi_is_float": alibi is not None and alibi.dtype == torch.float32,
    }


def launch_instance(
    launcher: KernelLauncher, instance: Instance, grid: tuple[int, ...], fields: dict[str, Any]
) -> None:
    """Launch a kernel of `AttentionParameters`."""
    parameters = pack(instance.variant, **fields)
    launcher.launch(instance.variant, grid, (instance.threads,), parameters, instance.shared_bytes)


def _check(q: Tensor, cache: Cache, batch: AttentionBatch, out: Tensor) -> None:
    k_cache, v_cache = cache.k, cache.v
    if q.dtype not in DTYPES or k_cache.dtype not in (q.dtype, *FP8):
        raise TypeError(f"attention: no kernel for queries of {q.dtype} and keys of {k_cache.dtype}")
    if v_cache.dtype != k_cache.dtype or v_cache.shape != k_cache.shape:
        raise ValueError("attention: K and V must have the same shape and dtype")
    heads, head_dim = q.shape[1:]
    kv_heads, block_size, cached_dim = k_cache.shape[1:]
    if (
        head_dim not in HEAD_DIMS
        or cached_dim != head_dim
        or block_size not in BLOCK_SIZES
        or heads % kv_heads
    ):
        raise ValueError(f"attention: no kernel for q {tuple(q.shape)} over K {tuple(k_cache.shape)}")
    if out.shape != q.shape:
        raise ValueError("attention: out must be of q's shape")
    check_batch(q, cache, batch, out)


def check_batch(q: Tensor, cache: Cache, batch: AttentionBatch, out: Tensor) -> None:
    """Check what the kernels of all caches ask of a launch's tensors, beside shapes.

    Raises:
        TypeError: an index tensor is not int32.
        ValueError: a tensor does not lie as it must, or tensors are not of the same batch.
    """
    if not all(memory.is_contiguous() for memory in cache.tensors):
        raise ValueError("attention: the caches must be contiguous")
    if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8:
        raise ValueError(f"attention: the strides of q, {q.stride()}, must be multiples of 8 and 1")
    if out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError("attention: out must be contiguous, of q's dtype")
    if any(tensor.data_ptr() % 16 for tensor in (q, *cache.tensors, out)):
        raise ValueError("attention: tensors must be aligned to 16 bytes")
    requests = len(batch.seq_lens)
    if batch.query_start_loc.shape != (requests + 1,) or len(batch.block_table) != requests:
        raise ValueError("attention: query_start_loc, seq_lens and block_table are not of the same batch")
    for tensor in (batch.query_start_loc, batch.seq_lens, batch.block_table):
        if tensor.dtype != torch.int32:
            raise TypeError("attention: index tensors must be int32")
        if tensor.stride(-1) != 1:
            raise ValueError("attention: index tensors must be contiguous along their last axis")


def check_terms(q: Tensor, scale: float, terms: LogitTerms) -> None:
    """Check what the kernels of all caches ask of the scale and the terms of logits.

    Raises:
        TypeError: sinks or slopes are of another dtype.
        ValueError: they are of other shapes, or no kernel supports them.
    """
    heads = q.shape[1]
    for numbers in (terms.sinks, terms.alibi):
        if numbers is not None and (numbers.shape != (heads,) or not numbers.is_contiguous()):
            raise ValueError(f"attention: sinks and slopes must be [{heads}]")
        if numbers is not None and numbers.dtype not in (torch.float32, q.dtype):
            raise TypeError(
                f"attention: sinks and slopes must be float32 or of q's dtype, not {numbers.dtype}"
            )
    if any(size is not None and size <= 0 for size in (scale, terms.window, terms.chunk)):
        raise ValueError(
            f"attention: scale {scale}, window {terms.window} and chunk {terms.chunk} must be above 0"
        )


def _radius(relative_bias: Tensor | None) -> int:
    """The largest distance that has a bias, see `LogitTerms`."""
    return 0 if relative_bias is None else relative_bias.shape[1] // 2


def _check_two_sided(q: Tensor, cache: Cache, batch: AttentionBatch, terms: LogitTerms) -> None:
    heads, head_dim = q.shape[1:]
    if head_dim not in TWO_SIDED_HEAD_DIMS or cache.k.dtype != q.dtype:
        sizes = ", ".join(map(str, TWO_SIDED_HEAD_DIMS))
        raise ValueError(
            f"attention to later keys: no kernel for heads of {head_dim} and keys of {cache.k.dtype}, only for "
            f"heads of {sizes} and keys of q's dtype; CPUs serve it, and so does float32 without kernels"
        )
    if not 0 <= terms.future <= WHOLE:
        raise ValueError(f"attention: future {terms.future} must be from 0 to {WHOLE}")
    if (relative_bias := terms.relative_bias) is None:
        return
    if relative_bias.dtype != torch.float32:
        raise TypeError(f"attention: biases by distance must be float32, not {relative_bias.dtype}")
    if relative_bias.dim() != 2 or relative_bias.shape[1] % 2 or not relative_bias.is_contiguous():
        raise ValueError("attention: biases by distance must be [heads, 2 R], contiguous")
    longest, radius = -(-batch.max_seq_len // STEP_KEYS) * STEP_KEYS, _radius(relative_bias)
    if len(relative_bias) != heads or radius < longest:
        raise ValueError(
            f"attention: biases of {len(relative_bias)} heads and distances up to {radius} for {heads} heads and "
            f"{batch.max_seq_len} keys (rounded up to {longest})"
        )
