"""The headers of GGUF files, with the names that a checkpoint of transformers has. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pagewire.ipc.gguf.config import model_config
from pagewire.ipc.gguf.file import GgufError, GgufFile, read_gguf
from pagewire.workers.errors import LoadError
from pagewire.workers.model.gguf_names import MODELS, places
from pagewire.workers.model.headers import Headers, TensorHeader


def gguf_headers(path: str | Path, hf_overrides: Mapping[str, Any]) -> Headers:
    """The headers of a GGUF file, or of all parts of a split one.

    Raises:
        LoadError: a file is missing or broken, or of a model that is not served.
    """
    try:
        file = read_gguf(path)
        config = {**model_config(file), **hf_overrides}
        tensors = list(_tensors(file, config))
    except GgufError as error:
        raise LoadError(str(error)) from error
    return Headers(config, tensors, len({info.path for info in file.tensors.values()}), "GGUF")


def _tensors(file: GgufFile, config: Mapping[str, Any]) -> Iterator[TensorHeader]:
    if config["model_type"] not in MODELS:
        raise LoadError(f"{file.path}: {config['model_type']} is not served from GGUF files")
    shapes = {name: info.shape for name, info in file.tensors.items()}
    try:
        found = places(config["model_type"], shapes, 1, 1)
    except KeyError as error:
        raise LoadError(f"{file.path} has tensors of unknown names: {error}") from error
    for name, place in found.items():
        info = file.tensors[place.tensor]
        if place.expert is None:
            yield TensorHeader(name, info.shape, info.type, info.num_bytes)
        else:
            yield TensorHeader(name, info.shape[1:], info.type, info.num_bytes // info.shape[0])
