"""Checks and conversions of tensors before they are passed to the compiled library."""

import ctypes

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import structure
from pagewire.kernels.data.kv_codes import EIGHT_BITS, FOUR_BITS, head_size
from pagewire.kernels.data.layer import LayerNorm, Norm
from pagewire.kernels.data.paging import AttentionBatch, Cache, LogitTerms

LogitTermsStruct, NormParameters = map(structure, ("LogitTerms", "Norm"))

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that the kernels are compiled for, and their numbers in the C++ code."""
CACHE_DTYPES = DTYPES | {EIGHT_BITS: 3, FOUR_BITS: 4}
"""The dtypes that a KV cache may have, and their numbers in the C++ code."""


def cache_fields(library: ctypes.CDLL, cache: Cache) -> dict[str, int]:
    """The fields of `AttentionCall` for a layer's cache.

    Raises:
        ValueError: their dtypes differ, their heads are not contiguous within a block, a pair of values would be
            split by a block, or values that are a part of keys end within a pair of elements or have 4 bits.
    """
    k_cache, v_cache = cache.k, cache.v
    for stored in cache.tensors:
        check_cache(library, stored)
    if cache.values_in_keys and head_size(v_cache) % 2:
        raise ValueError(f"{head_size(v_cache)} elements of keys cannot be values: their number must be even")
    if cache.values_in_keys and k_cache.dtype == FOUR_BITS:
        raise ValueError("keys of 4 bits have no values in them")
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(f"keys of {k_cache.dtype} and values of {v_cache.dtype}")
    return {
        "k_cache": k_cache.data_ptr(),
        "v_cache": v_cache.data_ptr(),
        "cache_dtype": CACHE_DTYPES[k_cache.dtype],
        "num_kv_heads": k_cache.shape[1],
        "v_head_dim": head_size(v_cache),
        "k_block_stride": k_cache.stride(0),
        "k_head_stride": k_cache.stride(1),
        "v_block_stride": v_cache.stride(0),
        "v_head_stride": v_cache.stride(1),
        "num_blocks": k_cache.shape[0],
        "block_size": k_cache.shape[2],
    }


def logit_terms(
    terms: LogitTerms, num_heads: int, num_tokens: int = 0
) -> tuple[ctypes.Structure, list[Tensor]]:
    """Terms as the library takes them, and the tensors that must live as long as the struct.

    Raises:
        ValueError: what each head has is not there for `num_heads` heads, or chosen keys are no int32 [T, C].
    """
    per_head = {name: getattr(terms, name) for name in ("sinks", "alibi", "relative_bias")}
    tensors = {name: x.to(torch.float32).contiguous() for name, x in per_head.items() if x is not None}
    for name, x in tensors.items():
        by_distance = name == "relative_bias" and x.dim() == 2 and len(x) == num_heads and x.shape[1] % 2 == 0
        if x.shape != (num_heads,) and not by_distance:
            raise ValueError(f"{name} for each of {num_heads} heads expected, not {tuple(x.shape)}")
    if (chosen := terms.chosen) is not None:
        if chosen.dtype != torch.int32 or chosen.shape[:-1] != (num_tokens,):
            raise ValueError(
                f"chosen keys of {num_tokens} tokens are not {chosen.dtype} {tuple(chosen.shape)}"
            )
        tensors["chosen"] = chosen.contiguous()
    struct = LogitTermsStruct(
        **{name: x.data_ptr() for name, x in tensors.items()},
        bias_radius=tensors["relative_bias"].shape[1] // 2 if "relative_bias" in tensors else 0,
        num_chosen=0 if chosen is None else chosen.shape[1],
        window=terms.window or 0,
        chunk=terms.chunk or 0,
        future=terms.future,
        softcap=terms.softcap or 0.0,
    )
    return struct, list(tensors.values())


def norm_struct(norm: Norm | LayerNorm, size: int, dtype: torch.dtype) -> ctypes.Structure:
    """A norm of rows [size] as the library takes it; it must live as long as the struct.

    Raises:
        ValueError: its weight or its bias has another shape or dtype.
    """
    bias = None if isinstance(norm, Norm) else norm.bias
    for vector in (norm.weight, bias):
        if vector is not None and not (
            vector.shape == (size,) and vector.dtype == dtype and vector.is_contiguous()
        ):
            raise ValueError(f"a norm's weight and bias [{size}] of {dtype} expected")
    return NormParameters(
        weight=norm.weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        eps=norm.eps,
        offset=norm.offset if isinstance(norm, Norm) else 0.0,
        centred=isinstance(norm, LayerNorm),
    )


def check_cache(library: ctypes.CDLL, cache: Tensor) -> None:
    """Refuse a cache [num_blocks, heads, block_size, size] that does not allow the kernels' layout.

    Raises:
        ValueError: why.
    """
    _, _, block_size, size = cache.shape
    if cache.stride()[2:] != (size, 1):
        raise ValueError(f"a head's rows must be contiguous within a block, strides are {cache.stride()}")
    if block_size % library.pagewire_pair(CACHE_DTYPES[cache.dtype]):
        raise ValueError(f"{cache.dtype} needs blocks of an even number of tokens, not {block_size}")


def set_batch(attention: ctypes.Structure, batch: AttentionBatch, num_tokens: int) -> int:
    """Point an `AttentionCall` to a batch of `num_tokens` tokens; returns the address of its slots.

    Raises:
        ValueError: a tensor has another shape or dtype, or is not contiguous.
    """
    starts, lens = batch.query_start_loc, batch.seq_lens
    table, slots = batch.block_table, batch.slot_mapping
    # `shape[0]`, since `len` of a tensor is a function in Python.
    num_requests = lens.shape[0]
    if (
        any(tensor.dtype != torch.int32 or not tensor.is_contiguous() for tensor in (starts, lens, table))
        or slots.dtype != torch.int64
        or slots.shape != (num_tokens,)
        or not slots.is_contiguous()
        or starts.shape[0] != num_requests + 1
        or table.shape[0] < num_requests
    ):
        raise ValueError(f"the batch does not fit {num_tokens} tokens")
    attention.query_start_loc, attention.seq_lens = starts.data_ptr(), lens.data_ptr()
    attention.block_table, attention.block_table_stride = table.data_ptr(), table.stride(0)
    attention.whole = None if batch.whole is None else batch.whole.data_ptr()
    attention.num_tokens, attention.num_requests = num_tokens, num_requests
    attention.max_blocks = table.shape[1]
    attention.num_threads = torch.get_num_threads()
    return slots.data_ptr()


def last_contiguous(x: Tensor) -> Tensor:
    """x, or a copy whose last axis is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def of_size(weight: Tensor, size: int) -> Tensor:
    """A contiguous weight [size].

    Raises:
        ValueError: it has another shape.
    """
    if weight.shape != (size,):
        raise ValueError(f"weight of shape {tuple(weight.shape)} for rows of {size}")
    return weight.contiguous()
