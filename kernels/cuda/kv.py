"""Writing keys and values into the KV cache: norm, rotation, rounding and store in one kernel."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.data.layer import Angles, HeadNorms
from pagewire.kernels.data.paging import Cache, check_scales

FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
LARGEST_HEAD = 256
WARPS = 4


class _Sizes(NamedTuple):
    """The sizes of a launch, named as in the kernel's struct."""

    num_tokens: int
    num_heads: int
    """Query heads; 0 without queries."""
    num_kv_heads: int
    size: int
    """Elements of a query or key head."""
    v_size: int
    rotated: int
    """Elements of a head that are rotated."""
    block_size: int

    @classmethod
    def of(cls, q: Tensor | None, k: Tensor, v_cache: Tensor, cos: Tensor | None) -> "_Sizes":
        num_heads = 0 if q is None else q.shape[1]
        rotated = 0 if cos is None else cos.shape[1]
        num_tokens, num_kv_heads, size = k.shape
        block_size, v_size = v_cache.shape[2:]
        return cls(num_tokens, num_heads, num_kv_heads, size, v_size, rotated, block_size)


@functools.cache
def variant(dtype: torch.dtype, cache_dtype: torch.dtype) -> Variant:
    """The kernel for a model's dtype and its cache's dtype."""
    cached = FP8.get(cache_dtype) or DTYPES[cache_dtype]
    return Variant("kv.cu", f"write_kv<{DTYPES[dtype]}, {cached}>", "WriteKv")


def variants() -> list[Variant]:
    """The kernel for each dtype of a model and each dtype that its cache may have."""
    return [variant(dtype, cache_dtype) for dtype in DTYPES for cache_dtype in (dtype, *FP8)]


def write_kv(
    launcher: KernelLauncher,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    slot_mapping: Tensor,
    angles: Angles | None = None,
    head_norms: HeadNorms | None = None,
) -> None:
    """Norm and rotate queries in place; norm and rotate keys, and write them and the values into the cache.

    One kernel for `rms_norm`, `rotary` and `store_kv` of `Kernels`, except that k is not changed.

    Args:
        q: [T, Hq, D], any strides as long as D is contiguous; None for no queries.
        k: [T, Hkv, D], with strides as for q.
        v: [T, Hkv, Dv], with strides as for q.
        cache: contiguous, in pages (`layout.py`), of k's dtype or an 8-bit float. Its scales divide keys and values
            before they become 8-bit floats; larger values than an 8-bit float has become its largest.
        slot_mapping: int64 [T], `block * block_size + row` inside the cache; -1 writes nothing.
        angles: see `Kernels.rotary`; rot_dim is a multiple of 16. None for no rotation.
        head_norms: of query and key heads, of equal eps; None norms no heads.

    Raises:
        TypeError: no kernel supports the dtypes.
        ValueError: shapes disagree or are no multiples of 8 (16 for 8-bit caches), heads are longer than 256, or
            a tensor is not aligned to 16 bytes, scales are given for a cache of 16 bits, or norms have two eps.
    """
    check_scales(cache)
    k_cache, v_cache, scales = cache.k, cache.v, cache.scales
    cos, sin = angles or (None, None)
    sizes = _Sizes.of(q, k, v_cache, cos)
    weights, numbers = _norm_fields(head_norms)
    tensors = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "k_cache": k_cache, "v_cache": v_cache}
    tensors |= {"slots": slot_mapping, **weights}
    _check_dtypes(tensors, k.dtype, k_cache.dtype)
    _check_shapes(tensors, sizes, len(v_cache))
    _check_write(tensors, sizes, 16 // k_cache.dtype.itemsize)
    if sizes.num_tokens == 0:
        return
    kernel = variant(k.dtype, k_cache.dtype)
    lanes = next(lanes for lanes in (4, 8, 16, 32) if max(sizes.size, sizes.v_size) <= 8 * lanes)
    strides = _strides(("token", "head"), q=q, k=k, v=v) | _strides(("",), cos=cos, sin=sin)
    numbers |= {"lanes": lanes, "k_factor": 1 / scales.k, "v_factor": 1 / scales.v}
    parameters = pack(kernel, **tensors, **strides, **sizes._asdict(), **numbers)
    num_heads = sizes.num_tokens * (sizes.num_heads + 2 * sizes.num_kv_heads)
    heads_per_block = 32 * WARPS // lanes
    launcher.launch(kernel, (-(-num_heads // heads_per_block),), (32 * WARPS,), parameters)


def _norm_fields(head_norms: HeadNorms | None) -> tuple[dict[str, Tensor | None], dict[str, float]]:
    """The fields of the kernel's struct for norms of heads: weights, and numbers."""
    if head_norms is None:
        return {"q_weight": None, "k_weight": None}, {"eps": 0.0, "q_offset": 0.0, "k_offset": 0.0}
    q, k = head_norms
    if q.eps != k.eps:
        raise ValueError(f"the norms of query and key heads must have equal eps, not {q.eps} and {k.eps}")
    weights: dict[str, Tensor | None] = {"q_weight": q.weight, "k_weight": k.weight}
    return weights, {"eps": q.eps, "q_offset": q.offset, "k_offset": k.offset}


def _strides(axes: tuple[str, ...], **tensors: Tensor | None) -> dict[str, int]:
    """The fields `<tensor>_<axis>_stride` for the tensors' first axes, in elements; 0 where there is no tensor."""
    return {
        "_".join(filter(None, (name, axis, "stride"))): 0 if tensor is None else tensor.stride(number)
        for name, tensor in tensors.items()
        for number, axis in enumerate(axes)
    }


ROTATED = 16
"""Of so many elements the rotated ones of a head are a multiple."""
_CACHED = ("k_cache", "v_cache", "slots")


def _inputs(tensors: Mapping[str, Tensor | None]) -> list[Tensor]:
    """The tensors of the model's dtype."""
    return [tensor for name, tensor in tensors.items() if tensor is not None and name not in _CACHED]


def _check_dtypes(tensors: Mapping[str, Tensor | None], dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if dtype not in DTYPES or cache_dtype not in (dtype, *FP8) or dtypes["v_cache"] != cache_dtype:
        raise TypeError(f"write_kv: no kernel from {dtype} to {cache_dtype} and {dtypes['v_cache']}")
    if dtypes["slots"] != torch.int64:
        raise TypeError(f"write_kv: slots must be int64, not {dtypes['slots']}")
    if any(tensor.dtype != dtype for tensor in _inputs(tensors)):
        listed = ", ".join(f"{name} {dtypes[name]}" for name in dtypes if name not in _CACHED)
        raise TypeError(f"write_kv: inputs must be of k's dtype: {listed}")


def _check_shapes(tensors: Mapping[str, Tensor | None], sizes: _Sizes, num_blocks: int) -> None:
    tokens, heads, kv_heads, size, v_size, rotated, block_size = sizes
    expected = {
        "q": (tokens, heads, size),
        "k": (tokens, kv_heads, size),
        "v": (tokens, kv_heads, v_size),
        "cos": (tokens, rotated),
        "sin": (tokens, rotated),
        "q_weight": (size,),
        "k_weight": (size,),
        "k_cache": (num_blocks, kv_heads, block_size, size),
        "v_cache": (num_blocks, kv_heads, block_size, v_size),
        "slots": (tokens,),
    }
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != expected[name]:
            raise ValueError(
                f"write_kv: shapes disagree: {name} {tuple(tensor.shape)}, expected {expected[name]}"
            )


def _check_write(tensors: Mapping[str, Tensor | None], sizes: _Sizes, chunk: int) -> None:
    """Check sizes and alignment. chunk: elements of the cache in 16 bytes."""
    size, v_size, rotated = sizes.size, sizes.v_size, sizes.rotated
    too_large = max(size, v_size) > LARGEST_HEAD or rotated > size
    if too_large or size % chunk or v_size % chunk or rotated % ROTATED:
        raise ValueError(
            f"write_kv: no kernel for heads of {size} and {v_size}, {rotated} of them rotated: multiples of {chunk}"
            f" up to {LARGEST_HEAD}, and of 16"
        )
    cached = [tensor for name in _CACHED if (tensor := tensors[name]) is not None]
    misplaced = any(tensor.data_ptr() % 16 for tensor in (*cached[:2], *_inputs(tensors)))
    if misplaced or not all(tensor.is_contiguous() for tensor in cached):
        raise ValueError(
            "write_kv: heads and caches must be aligned to 16 bytes, caches and slots contiguous"
        )
    if not all(map(_has_whole_chunks, _inputs(tensors))):
        raise ValueError("write_kv: heads must be contiguous, and lie multiples of 16 bytes apart")


def _has_whole_chunks(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 and all(stride % 8 == 0 for stride in tensor.stride()[:-1])
