"""Sends other weights to the core: the path of a file, or tensors piece by piece."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from pagewire.ipc.wire.budget import MAX_WEIGHT_BYTES

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
Call = Callable[..., Future[Any]]


def send_weights(
    call: Call, weights: str | os.PathLike[str] | Mapping[str, Any], version: str, requests: str
) -> Future[Any]:
    """Have the core change the weights; the future gets their version, or the error. Blocks while tensors are sent.

    call: calls a method of the core.

    Raises:
        TypeError: what is no tensor, or of another dtype. Others: as the core answers.
    """
    if isinstance(weights, str | os.PathLike):
        return call("update_weights", os.fspath(weights), 0, version, requests)
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a path, or tensors by name, got {type(weights).__name__}")
    upload = send_tensors(call, weights)
    return call("update_weights", "", upload, version, requests)


def send_tensors(call: Call, tensors: Mapping[str, Any]) -> int:
    """Send tensors; returns the number of the upload."""
    forms = [[name, dtype_of(name, tensor), list(tensor.shape)] for name, tensor in tensors.items()]
    upload: int = call("begin_weights", forms).result()
    offset = 0
    for tensor in tensors.values():
        for data in pieces(tensor):
            offset = call("send_weights", upload, offset, data).result()
    return upload


def dtype_of(name: str, tensor: Any) -> str:
    """The dtype of a tensor, as safetensors files have it.

    Raises:
        TypeError: it is no tensor of PyTorch or NumPy, or of another dtype.
    """
    own = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if own not in DTYPES or not hasattr(tensor, "shape"):
        raise TypeError(f"{name!r} must be a tensor of {', '.join(DTYPES)}, got {own}")
    return DTYPES[own]


def pieces(tensor: Any) -> Iterator[bytes]:
    """The bytes of a tensor in C order, a part at a time."""
    if not hasattr(tensor, "data_ptr"):  # NumPy's
        whole = tensor.tobytes()
        for start in range(0, len(whole), MAX_WEIGHT_BYTES):
            yield whole[start : start + MAX_WEIGHT_BYTES]
        return
    held = tensor.detach().cpu().contiguous()
    size = held.numel() * held.element_size()
    for start in range(0, size, MAX_WEIGHT_BYTES):
        yield ctypes.string_at(held.data_ptr() + start, min(MAX_WEIGHT_BYTES, size - start))
