"""Reads the configuration of a model, which is that of its family if its repository brings code.

A frontend needs none of this: it gets what it needs to know from its core.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.ipc.families.family import ForeignModel
from pagewire.ipc.families.registry import foreign_model
from pagewire.ipc.files.hub import MODELOPT_FILE, read_json
from pagewire.ipc.gguf.config import generation_config, gguf_model_config
from pagewire.ipc.gguf.file import is_gguf, read_gguf


def read_configs(path: Path, trust_remote_code: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model's configuration and generation settings: of a folder's JSON files, or of a GGUF file's metadata.

    The configuration is that of the module which runs: for a family whose repositories bring code (`families/`),
    that of transformers' module. With `trust_remote_code` a family that is not served keeps its own, for its code.

    Raises:
        ValueError: a file is broken, or the family is not served. ModelNotFoundError: it is a GGUF file of an
            architecture that is not served.
    """
    if is_gguf(path):
        file = read_gguf(path)
        return gguf_model_config(file), generation_config(file)
    values = read_json(path / "config.json")
    foreign = foreign_model(values, trust_remote_code)
    config = values if foreign is None else dict(foreign.config)
    if (settings := _quantisation(path, values)) is not None:
        config["quantization_config"] = settings
    return config, read_json(path / "generation_config.json")


def _quantisation(path: Path, values: Mapping[str, Any]) -> Any:
    """How a checkpoint says that it is quantised: in its config.json, in the part of that for text, or in the file
    of ModelOpt; None if nowhere."""
    text = values.get("text_config")
    for config in (values, text if isinstance(text, dict) else {}):
        if config.get("quantization_config") is not None:
            return config["quantization_config"]
    settings = read_json(path / MODELOPT_FILE).get("quantization")
    return {"quant_method": "modelopt", **settings} if isinstance(settings, dict) else None


def read_foreign(path: Path, trust_remote_code: bool) -> ForeignModel | None:
    """The model in a folder as one of a family; None as for `foreign_model`, and for a GGUF file.

    Raises:
        ValueError: config.json is broken, or the family is not served.
    """
    return None if is_gguf(path) else foreign_model(read_json(path / "config.json"), trust_remote_code)
