"""Writes safetensors files whose tensors are made one after the other, so that few are in memory at a time.

The header comes first in such a file, so dtypes and shapes of all tensors must be known before one is made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SHARD_BYTES = 5 << 30
ALIGNMENT = 8


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class Shard:
    """A safetensors file of planned tensors, which may be written in any order."""

    def __init__(self, path: Path, entries: Sequence[PlannedTensor]) -> None:
        """Create the file with its header.

        Raises:
            OSError: it exists, or cannot be written.
        """
        self._entries, self._offsets, self._missing = (
            {entry.name: entry for entry in entries},
            dict[str, int](),
            {entry.name for entry in entries},
        )
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):  # so that each is aligned
            self._offsets[entry.name], start, end = end, end, end + entry.num_bytes
            header[entry.name] = {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._start = 8 + len(text)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a planned tensor.

        Raises:
            ValueError: it is of another dtype or shape than planned. OSError: the disk is full, or fails.
        """
        entry = self._entries[name]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise ValueError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, planned was {entry}")
        self._file.seek(self._start + self._offsets[name])
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def close(self) -> None:
        """Close the file.

        Raises:
            ValueError: a planned tensor was not written. OSError: the disk is full, or fails.
        """
        self._file.close()
        if self._missing:
            raise ValueError(f"{sorted(self._missing)} were planned and not written")


def shards(
    pieces: Iterable[Sequence[PlannedTensor]], max_bytes: int = SHARD_BYTES
) -> list[tuple[str, list[PlannedTensor]]]:
    """The files of a checkpoint by name, with the tensors in each; those of a piece lie in one file.

    max_bytes: of tensors in a file, unless a single piece has more.
    """
    files: list[list[PlannedTensor]] = []
    room = 0
    for piece in pieces:
        size = sum(entry.num_bytes for entry in piece)
        if not files or size > room:
            files.append([])
            room = max_bytes
        files[-1].extend(piece)
        room -= size
    if len(files) == 1:
        return [("model.safetensors", files[0])]
    return [
        (f"model-{number:05}-of-{len(files):05}.safetensors", entries)
        for number, entries in enumerate(files, 1)
    ]


def index(files: Sequence[tuple[str, Sequence[PlannedTensor]]]) -> dict[str, object]:
    """The content of `model.safetensors.index.json` for several files."""
    return {
        "metadata": {"total_size": sum(entry.num_bytes for _, entries in files for entry in entries)},
        "weight_map": {entry.name: name for name, entries in files for entry in entries},
    }
