"""What the headers of a checkpoint's files say about its tensors, without reading them. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pagewire.ipc.counts import check_counts
from pagewire.ipc.families.family import ForeignModel
from pagewire.ipc.files.hub import read_json
from pagewire.ipc.files.model_configs import read_configs, read_foreign
from pagewire.ipc.files.safetensors import LENGTH_BYTES, parse_header
from pagewire.ipc.gguf.config import gguf_model_config
from pagewire.ipc.gguf.file import GgufError, TensorInfo, is_gguf, read_gguf
from pagewire.ipc.quoting import quoted
from pagewire.workers.checkpoint.gguf_names import BLOCKS, MODELS, WeightPlace, joined_shape, places
from pagewire.workers.errors import LoadError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MAX_HEADER_BYTES = 32 << 20  # of a safetensors file: 200,000 tensors; reading it takes 2 s at most
MAX_FILES = 1 << 12  # of a checkpoint; each is opened before anything else is known
MAX_CONTENT = 64 << 10  # bytes of a tensor that describes another one
WITHOUT_HEADERS = ("pt", "dummy", "sharded_state")
"""Load formats of weights that no header describes: pickles, random numbers, and the parts of ranks."""

DTYPES = (
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    | {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
    | {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
)
"""Dtypes that are read, by their names in safetensors files: as PyTorch calls them."""
FLOATS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
"""Bits of the numbers that a dense weight may hold."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor of a checkpoint as its file describes it; `dtype` by the file's own name, such as "BF16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    content: Callable[[], bytes] = field(default=bytes, compare=False, repr=False)
    """Reads its bytes, at most `MAX_CONTENT`. Raises OSError."""


@dataclass(frozen=True)
class Headers:
    """All that is known of a checkpoint before its tensors are read.

    config: the model's, with the names of a `config.json`. form: of the files: "safetensors", "GGUF".
    foreign: the family that gives the tensors their names, if these are not transformers'.
    """

    config: Mapping[str, Any]
    tensors: Sequence[TensorHeader]
    num_files: int
    form: str
    foreign: ForeignModel | None = None


def read_headers(
    model_path: str | Path, hf_overrides: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> Headers:
    """The headers of a model folder or GGUF file; `hf_overrides` are merged into its configuration.

    trust_remote_code: as in `read_configs`.

    Raises:
        LoadError: a file is missing or broken, or of a model that is not served.
    """
    path, overrides = Path(model_path), hf_overrides or {}
    if is_gguf(path):
        headers = _gguf_headers(path, overrides)
    else:
        headers = _safetensors_headers(path, overrides, trust_remote_code)
    try:
        check_counts(headers.config)
    except ValueError as error:
        raise LoadError(f"cannot load {model_path}: {error}") from error
    return headers


def _safetensors_headers(folder: Path, hf_overrides: Mapping[str, Any], trust_remote_code: bool) -> Headers:
    files = weight_files(folder)
    try:
        config, _ = read_configs(folder, trust_remote_code)
        foreign = read_foreign(folder, trust_remote_code)
    except (ValueError, OSError) as error:
        raise LoadError(f"cannot load {folder}: {error}") from error
    tensors = [tensor for path in files for tensor in safetensors_header(path)]
    return Headers({**config, **hf_overrides}, tensors, len(files), "safetensors", foreign)


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
            raise LoadError(f"cannot load {index}: {error!r:.500}") from error
        if len(names) > MAX_FILES:
            raise LoadError(
                f"cannot load {index}: it names {len(names)} files, and at most {MAX_FILES} are read"
            )
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise LoadError(
                    f"cannot load {index}: {quoted(name)} is not the name of a file in its folder"
                )
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
        begin = LENGTH_BYTES + size
        return [
            TensorHeader(
                name,
                tuple(entry.shape),
                entry.dtype,
                entry.num_bytes,
                partial(_content, path, begin + entry.data_offsets[0], entry.num_bytes),
            )
            for name, entry in parse_header(header, path.stat().st_size - begin)
        ]
    except (OSError, ValueError, struct.error) as error:
        raise LoadError(f"cannot load {path}: {error}") from error


def _content(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(min(size, MAX_CONTENT))


def _gguf_headers(path: Path, hf_overrides: Mapping[str, Any]) -> Headers:
    """The headers of a GGUF file, or of all parts of a split one, with the names that transformers has."""
    try:
        file = read_gguf(path)
        config = {**gguf_model_config(file), **hf_overrides}
    except GgufError as error:
        raise LoadError(str(error)) from error
    if config["model_type"] not in MODELS:
        raise LoadError(f"{path}: {config['model_type']} is not served from GGUF files")
    try:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        found = places(config["model_type"], shapes, 1, 1, config["num_hidden_layers"])
        tensors = [_gguf_header(name, place, file.tensors) for name, place in found.items()]
    except KeyError as error:
        raise LoadError(f"{path} has tensors of unknown names: {error}") from error
    except ValueError as error:
        raise LoadError(f"{path}: {error}") from error
    return Headers(config, tensors, len({info.path for info in file.tensors.values()}), "GGUF")


def _gguf_header(name: str, place: WeightPlace, tensors: Mapping[str, TensorInfo]) -> TensorHeader:
    """The header of a weight with transformers' name, whose experts are [N, K] in any case."""
    info = tensors[place.tensor]
    if not place.form:
        shape, count = (info.shape, 1) if place.expert is None else (info.shape[1:], info.shape[0])
        return TensorHeader(name, shape, info.type, info.num_bytes // count)
    second = tensors[place.other] if place.other else None
    shape = joined_shape(place.form, info.shape, None if second is None else second.shape)
    # Parts of heads are put together as 8 bits in groups of 32: see `GgufCheckpoint`.
    kind = "Q8_0" if place.form == "heads" and info.type in BLOCKS else info.type
    return TensorHeader(name, shape, kind, info.num_bytes + (0 if second is None else second.num_bytes))
