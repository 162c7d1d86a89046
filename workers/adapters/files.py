"""Reads the files of an adapter: its configuration, and its tensors by name.

Each file is read once, in pieces, into memory of its own; what is checked, hashed and used is the same bytes, even
if the file is replaced or cut off meanwhile. There are few calls of the system: each lets the interpreter go, and
must wait for it afterwards.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.files.safetensors import LENGTH_BYTES, TensorEntry, parse_header
from pagewire.ipc.quoting import quoted
from pagewire.ipc.shapes import num_values
from pagewire.workers.adapters import config
from pagewire.workers.errors import first_line

TENSORS, PICKLE, NEW_ROWS = "adapter_model.safetensors", "adapter_model.bin", "new_embeddings.safetensors"
PIECE_BYTES = 1 << 22
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 8 << 20
MAX_NUMBER_BYTES = 8  # in a file; most numbers have 2 or 4
ROOM = MAX_HEADER_BYTES + (8 << 20)  # for names, and what a file's form adds
VECTORS = 3  # for each output: a bias, that of a second matrix, and DoRA's magnitudes
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class AdapterFiles:
    """What a folder holds: the bytes of its tensors' file, and the sha256 of that and of its configuration."""

    data: bytearray
    is_pickle: bool
    content: bytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The name of each tensor, and the tensor as a view of `data`.

        Raises:
            ValueError: the file is cut off, or is of another form, or has tensors that are no floats.
        """
        return iter(unpickled(self.data).items()) if self.is_pickle else parse_tensors(self.data)


def file_bytes(rank: int, adapted: Iterable[tuple[int, int]], whole: Iterable[tuple[int, int]]) -> int:
    """The most bytes that a file of tensors can have, as the configuration and the model say before it is read.

    adapted: outputs and inputs of the linear layers that may have low-rank matrices. A rank over both counts as the
    larger of them: a product of such matrices can be anything already. whole: of those that may have a weight.
    """
    numbers = sum(n * k for n, k in whole)
    numbers += sum(min(rank, max(n, k)) * (n + k) + VECTORS * n for n, k in adapted)
    return ROOM + MAX_NUMBER_BYTES * numbers


def read_config(folder: Path) -> bytes:
    """The configuration in an adapter's folder.

    Raises:
        FileNotFoundError: it is missing. OSError: it cannot be read. ValueError: it is no regular file, or too
            large.
    """
    return bytes(_read(folder / config.NAME, hashlib.sha256(), MAX_CONFIG_BYTES))


def read_files(folder: Path, settings: bytes, allow_pickle: bool, max_bytes: int) -> AdapterFiles:
    """The tensors' file in an adapter's folder.

    settings: its configuration. allow_pickle: read `adapter_model.bin` where there is no safetensors file.
    max_bytes: of the file; of a larger one nothing is read.

    Raises:
        FileNotFoundError: a file is missing. OSError: it cannot be read. ValueError: it is no regular file, or too
            large, or a pickle.
    """
    digest = hashlib.sha256(settings)
    digest.update(len(settings).to_bytes(LENGTH_BYTES, "little"))
    if (folder / NEW_ROWS).exists():
        raise ValueError(
            f"{NEW_ROWS} is not served: name embed_tokens and lm_head in modules_to_save instead"
        )
    try:
        data, is_pickle = _read(folder / TENSORS, digest, max_bytes), False
    except FileNotFoundError:
        if not (folder / PICKLE).exists():
            raise
        if not allow_pickle:
            raise ValueError(
                f"{quoted(str(folder))} has {PICKLE} and no {TENSORS}: pickled tensors are read only if the "
                "engine's option for them is on; PEFT saves safetensors by default"
            ) from None
        data, is_pickle = _read(folder / PICKLE, digest, max_bytes), True
    return AdapterFiles(data, is_pickle, digest.digest())


def _read(path: Path, digest: Any, max_bytes: int) -> bytearray:
    """The content of a regular file, which is added to a hash."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        lacks = f"has no {path.name}" if path.parent.is_dir() else "is no folder"
        raise FileNotFoundError(f"{quoted(str(path.parent))} {lacks}") from None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{path.name} is no regular file")
        if info.st_size > max_bytes:
            of_model = "" if path.name == config.NAME else " that its configuration and this model explain"
            raise ValueError(f"{path.name} has {info.st_size:,} bytes, over the {max_bytes:,}{of_model}")
        content = bytearray(info.st_size)
        view, done = memoryview(content), 0
        while done < len(view):
            count = os.readv(descriptor, [view[done : done + PIECE_BYTES]])
            if not count:
                raise ValueError(f"{path.name} was cut off while it was read")
            digest.update(view[done : done + count])
            done += count
    finally:
        os.close(descriptor)
    return content


def parse_tensors(content: bytearray) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file by name, as views of its content.

    Raises:
        ValueError: it is none, or is cut off, or has tensors that are no floats.
    """
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    start = LENGTH_BYTES + length
    if len(content) < LENGTH_BYTES or length > MAX_HEADER_BYTES or start > len(content):
        raise ValueError(f"{TENSORS} is no safetensors file, or is cut off in its header")
    try:
        for name, entry in parse_header(bytes(content[LENGTH_BYTES:start]), len(content) - start):
            yield name, _tensor(name, entry, content, start)
    except ValueError as error:
        raise ValueError(f"{TENSORS}: {error}") from None


def _tensor(name: str, entry: TensorEntry, content: bytearray, start: int) -> Tensor:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(
            f"{quoted(name)} is of dtype {quoted(entry.dtype)}: floats of 16 to 64 bits are served"
        )
    begin, end = entry.data_offsets
    size = num_values(entry.shape) * dtype.itemsize
    if end - begin != size:
        raise ValueError(f"{quoted(name)} of shape {quoted(entry.shape)} does not take {end - begin} bytes")
    if not size:
        return torch.empty(entry.shape, dtype=dtype)
    if (start + begin) % dtype.itemsize:
        data = torch.frombuffer(bytearray(content[start + begin : start + end]), dtype=dtype)
    else:
        data = torch.frombuffer(content, dtype=dtype, count=size // dtype.itemsize, offset=start + begin)
    return data.view(entry.shape)


def unpickled(content: bytearray) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote, through the unpickler that makes nothing but tensors.

    Raises:
        ValueError: it holds anything else.
    """
    try:
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{PICKLE} cannot be read: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{PICKLE} holds no tensors by name")
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.dtype not in DTYPES.values():
            raise ValueError(f"{PICKLE}: {quoted(name)} is no tensor of floats")
    return values
