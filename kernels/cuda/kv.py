"""Keys and values on their way into the cache: normed, rotated, rounded, written; queries on the way."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.kernels.cuda.launch import Device, pack
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.source import Variant

FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
LARGEST_HEAD = 256
WARPS = 4


class HeadNorms(NamedTuple):
    """RMS norms of each query head and each key head, before they are rotated; fields as in the kernel's struct."""

    q_weight: Tensor | None
    """[D]; None norms no heads."""
    k_weight: Tensor | None
    """[D]."""
    eps: float
    q_offset: float = 0.0
    """See `layers.rms_norm`."""
    k_offset: float = 0.0


NO_NORMS = HeadNorms(None, None, 0.0)


@functools.cache
def variant(dtype: torch.dtype, cache_dtype: torch.dtype) -> Variant:
    """The kernel for a model's and a cache's dtype."""
    kept = FP8.get(cache_dtype) or DTYPES[cache_dtype]
    return Variant("kv.cu", f"write_kv<{DTYPES[dtype]}, {kept}>", "WriteKv")


def variants() -> list[Variant]:
    """The kernel for each dtype of a model, and each dtype that its cache may have."""
    return [variant(dtype, kept) for dtype in DTYPES for kept in (dtype, *FP8)]


def write_kv(
    device: Device,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> None:
    """Norms and rotates queries in place; norms and rotates keys, and writes them and the values into the cache.

    In one kernel what `layers.rms_norm`, `layers.rotary` and `attention.store_kv` do one after another, but k is
    left as it is.

    Args:
        q: [T, Hq, D], any strides as long as D is contiguous; None leaves queries alone.
        k: [T, Hkv, D], likewise.
        v: [T, Hkv, Dv], likewise.
        k_cache: [num_blocks, Hkv, block_size, D], contiguous, in pages (`layout.py`), of k's dtype or an 8-bit
            float, which gets its largest value for what is beyond it.
        v_cache: [num_blocks, Hkv, block_size, Dv], likewise.
        slot_mapping: int64 [T], `block * block_size + row` inside the cache; -1 writes nothing.
        cos: [T, rot_dim], see `layers.rotary`, rot_dim a multiple of 16; None rotates nothing.
        sin: likewise.
        norms: None norms nothing.

    Raises:
        TypeError: dtypes that no kernel serves.
        ValueError: shapes disagree or are no multiples of 8 (16 for 8-bit caches), heads are longer than 256, or
            something is not aligned to 16 bytes.
    """
    _check(q, k, v, k_cache, v_cache, slot_mapping, cos, sin, norms)
    num_tokens, num_kv_heads, size = k.shape
    block_size, v_size = v_cache.shape[2:]
    num_heads = 0 if q is None else q.shape[1]
    if num_tokens == 0:
        return
    lanes = next(lanes for lanes in (4, 8, 16, 32) if max(size, v_size) <= 8 * lanes)
    kernel = variant(k.dtype, k_cache.dtype)
    tensors = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "k_cache": k_cache, "v_cache": v_cache}
    numbers = {"num_tokens": num_tokens, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "size": size}
    numbers |= {"v_size": v_size, "rotated": 0 if cos is None else cos.shape[1], "block_size": block_size}
    parameters = pack(
        kernel,
        **tensors,
        slots=slot_mapping,
        **_strides(("token", "head"), q=q, k=k, v=v),
        **_strides(("",), cos=cos, sin=sin),
        **numbers,
        lanes=lanes,
        **(norms or NO_NORMS)._asdict(),
    )
    heads_per_block = 32 * WARPS // lanes
    blocks = -(-num_tokens * (num_heads + 2 * num_kv_heads) // heads_per_block)
    device.launch(kernel, (blocks,), (32 * WARPS,), parameters)


def _strides(axes: tuple[str, ...], **tensors: Tensor | None) -> dict[str, int]:
    """The fields `<tensor>_<axis>_stride` for the tensors' first axes, in elements; 0 where there is no tensor."""
    return {
        "_".join(filter(None, (name, axis, "stride"))): 0 if tensor is None else tensor.stride(number)
        for name, tensor in tensors.items()
        for number, axis in enumerate(axes)
    }


def _check(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    norms: HeadNorms | None,
) -> None:
    num_tokens, num_kv_heads, size = k.shape
    num_blocks, _, block_size, v_size = v_cache.shape
    if k.dtype not in DTYPES or k_cache.dtype not in (k.dtype, *FP8) or v_cache.dtype != k_cache.dtype:
        raise TypeError(f"write_kv: no kernel from {k.dtype} to {k_cache.dtype} and {v_cache.dtype}")
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slots are int64, not {slot_mapping.dtype}")
    weights = () if norms is None else (norms.q_weight, norms.k_weight)
    inputs = [tensor for tensor in (q, k, v, cos, sin, *weights) if tensor is not None]
    if any(tensor.dtype != k.dtype for tensor in inputs):
        raise TypeError(f"write_kv: {k.dtype} expected, not {', '.join(str(t.dtype) for t in inputs)}")
    rotated = 0 if cos is None else cos.shape[1]
    if (
        v.shape != (num_tokens, num_kv_heads, v_size)
        or k_cache.shape != (num_blocks, num_kv_heads, block_size, size)
        or (q is not None and (q.shape[0], q.shape[2]) != (num_tokens, size))
        or slot_mapping.shape != (num_tokens,)
        or (cos is None) != (sin is None)
        or (cos is not None and sin is not None and not cos.shape == sin.shape == (num_tokens, rotated))
        or rotated > size
        or any(weight is None or weight.shape != (size,) for weight in weights)
    ):
        raise ValueError(
            f"write_kv: shapes disagree: q {None if q is None else tuple(q.shape)}, k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}, K {tuple(k_cache.shape)}, V {tuple(v_cache.shape)}, "
            f"slots {tuple(slot_mapping.shape)}, cos {None if cos is None else tuple(cos.shape)}"
        )
    chunk = 16 // k_cache.dtype.itemsize
    if max(size, v_size) > LARGEST_HEAD or size % chunk or v_size % chunk or rotated % 16:
        raise ValueError(
            f"write_kv: no kernel for heads of {size} and {v_size}, {rotated} of them rotated: multiples of {chunk}"
            f" up to {LARGEST_HEAD}, and of 16"
        )
    contiguous = all(tensor.is_contiguous() for tensor in (k_cache, v_cache, slot_mapping))
    if not contiguous or not all(map(_aligned, inputs)):
        raise ValueError(
            "write_kv: heads must be contiguous and aligned to 16 bytes, caches and slots contiguous"
        )


def _aligned(tensor: Tensor) -> bool:
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in tensor.stride()[:-1])
    )
