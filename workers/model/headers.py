"""What the header of a checkpoint says about its tensors, without reading them. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pagewire.ipc.hub import read_json
from pagewire.ipc.safetensors import LENGTH_BYTES, parse_header
from pagewire.workers.errors import LoadError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MAX_HEADER_BYTES = 32 << 20  # of a safetensors file: 200,000 tensors; reading it takes 2 s at most


class TensorHeader(NamedTuple):
    """A tensor of a checkpoint as its file describes it; `dtype` by the file's own name, such as "BF16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class CheckpointHeaders(Protocol):
    """All that is known of a checkpoint before its tensors are read."""

    @property
    def form(self) -> str:
        """The form of its files: "safetensors", "GGUF"."""

    @property
    def num_files(self) -> int:
        """The number of files that hold its tensors."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's configuration, with the names of a `config.json`."""

    @property
    def tensors(self) -> Sequence[TensorHeader]:
        """Its tensors."""


@dataclass(frozen=True)
class Headers:
    """See `CheckpointHeaders`."""

    config: Mapping[str, Any]
    tensors: Sequence[TensorHeader]
    num_files: int
    form: str


def safetensors_headers(model_path: str | Path, hf_overrides: Mapping[str, Any]) -> Headers:
    """The headers of the safetensors files in a model folder.

    Raises:
        LoadError: there are no files of weights, or one of them, or config.json, cannot be read.
    """
    folder = Path(model_path)
    files = weight_files(folder)
    try:
        config = read_json(folder / "config.json")
    except (ValueError, OSError) as error:
        raise LoadError(f"cannot load {folder}: {error}") from error
    tensors = [tensor for path in files for tensor in safetensors_header(path)]
    return Headers({**config, **hf_overrides}, tensors, len(files), "safetensors")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those in its index, or the only one.

    Raises:
        LoadError: there are none, or the index cannot be read.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(read_json(index)["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            raise LoadError(f"cannot load {index}: {error!r}") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise LoadError(f"cannot load {index}: {name!r} is not the name of a file in its folder")
        return [folder / name for name in sorted(names)]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    reason = f"it holds neither {SINGLE} nor {INDEX}"
    if any((folder / name).is_file() for name in PICKLES):
        reason += "; its .bin files are pickles, which are read only with load_format='pt'"
    raise LoadError(f"cannot load {folder}: {reason}")


def safetensors_header(path: Path) -> list[TensorHeader]:
    """The tensors that the header of a safetensors file lists.

    Raises:
        LoadError: the file cannot be read, is no safetensors file, or claims more bytes than it has.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(LENGTH_BYTES))
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = file.read(size)
        entries = parse_header(header, path.stat().st_size - LENGTH_BYTES - size)
        return [
            TensorHeader(name, tuple(entry.shape), entry.dtype, entry.num_bytes) for name, entry in entries
        ]
    except (OSError, ValueError, struct.error) as error:
        raise LoadError(f"cannot load {path}: {error}") from error
