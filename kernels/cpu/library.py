"""The compiled library: its functions, and how tensors are handed to them."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from pagewire.kernels.cpu.build import InstructionSet, build

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that the kernels are compiled for, and their numbers in the C++ code."""

SIGNATURES = {
    "pagewire_prepare": [],
    "pagewire_pair": [c_int32],
    "pagewire_attention": [c_void_p],
    "pagewire_store": [c_void_p] * 3 + [c_int64] * 9 + [c_int32] * 3,
    "pagewire_rms_norm": [c_void_p] * 3 + [c_int64] * 7 + [c_float] * 2 + [c_int32] * 2,
    "pagewire_add_rms_norm": [c_void_p] * 4 + [c_int64] * 2 + [c_float] * 2 + [c_int32] * 2,
    "pagewire_silu_and_mul": [c_void_p] * 2 + [c_int64] * 3 + [c_int32] * 2,
    "pagewire_gelu_tanh_and_mul": [c_void_p] * 2 + [c_int64] * 3 + [c_int32] * 2,
    "pagewire_packed_size": [c_int64] * 2 + [c_int32],
    "pagewire_pack": [c_void_p] * 2 + [c_int64] * 3 + [c_int32] * 2,
    "pagewire_linear": [c_void_p] * 4 + [c_int64] * 4 + [c_int32] * 2,
    "pagewire_linear_unpacked": [c_void_p] * 4 + [c_int64] * 5 + [c_int32] * 2,
    "pagewire_largest": [c_void_p] * 4 + [c_int64] * 3 + [c_int32] * 2,
    "pagewire_only_allowed": [c_void_p] * 3 + [c_int64] * 3 + [c_int32] * 2,
    "pagewire_token_masses": [c_void_p] * 2 + [c_int64, c_int32],
    "pagewire_decoder": [c_void_p],
    "pagewire_rotary": [c_void_p] * 3 + [c_int64] * 7 + [c_int32] * 2,
}


class AttentionCall(ctypes.Structure):
    """The arguments of one attention call; mirrors the struct of this name in kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k_cache", "v_cache", "out")),
        *((name, c_void_p) for name in ("query_start_loc", "seq_lens", "block_table", "sinks", "alibi")),
        *((name, c_int64) for name in ("q_token_stride", "q_head_stride")),
        *((name, c_int64) for name in ("k_block_stride", "k_head_stride")),
        *((name, c_int64) for name in ("v_block_stride", "v_head_stride")),
        *((name, c_int64) for name in ("block_table_stride", "num_tokens", "num_requests", "num_heads")),
        *((name, c_int64) for name in ("num_kv_heads", "head_dim", "v_head_dim")),
        *((name, c_int64) for name in ("num_blocks", "block_size", "max_blocks", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("dtype", "num_threads")),
    )


class InstructionsRefusedError(RuntimeError):
    """The CPU has the instructions, but the system does not let this process use them."""


def open_library(isa: InstructionSet) -> ctypes.CDLL:
    """The library for an instruction set, compiled on first use.

    Raises:
        BuildError, OSError: it cannot be compiled or loaded.
        InstructionsRefusedError: the system forbids its instructions (AMX needs a permission per process).
    """
    library = ctypes.CDLL(str(build(isa)))
    for name, argument_types in SIGNATURES.items():
        getattr(library, name).argtypes = argument_types
    library.pagewire_packed_size.restype = c_int64
    if library.pagewire_prepare():
        raise InstructionsRefusedError(f"the system does not let this process use {isa.name}")
    return library


def cache_fields(library: ctypes.CDLL, k_cache: Tensor, v_cache: Tensor) -> dict[str, int]:
    """What `AttentionCall` says of a layer's caches, but for where they lie.

    Raises:
        ValueError: their heads are not contiguous within a block, or a pair of values would lie in two.
    """
    for cache in (k_cache, v_cache):
        check_cache(library, cache)
    return {
        "k_block_stride": k_cache.stride(0),
        "k_head_stride": k_cache.stride(1),
        "v_block_stride": v_cache.stride(0),
        "v_head_stride": v_cache.stride(1),
        "num_blocks": k_cache.shape[0],
        "block_size": k_cache.shape[2],
    }


def check_cache(library: ctypes.CDLL, cache: Tensor) -> None:
    """Refuse a cache [num_blocks, heads, block_size, size] that the kernels cannot arrange as they want to.

    Raises:
        ValueError: why.
    """
    _, _, block_size, size = cache.shape
    if cache.stride()[2:] != (size, 1):
        raise ValueError(f"a head's rows must be contiguous within a block, strides are {cache.stride()}")
    if block_size % library.pagewire_pair(DTYPES[cache.dtype]):
        raise ValueError(f"{cache.dtype} needs blocks of an even number of tokens, not {block_size}")


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
