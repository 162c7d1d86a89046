"""The headers of a checkpoint in any form that is served. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.ipc.gguf.file import is_gguf
from pagewire.workers.model.gguf_headers import gguf_headers
from pagewire.workers.model.headers import CheckpointHeaders, safetensors_headers

WITHOUT_HEADERS = ("pt", "dummy", "sharded_state")
"""Load formats of weights that no header describes: pickles, random numbers, and the parts of ranks."""


def read_headers(model_path: str | Path, hf_overrides: Mapping[str, Any] | None = None) -> CheckpointHeaders:
    """The headers of a model folder or GGUF file; `hf_overrides` are merged into its configuration.

    Raises:
        LoadError: a file is missing or broken, or of a model that is not served.
    """
    read = gguf_headers if is_gguf(model_path) else safetensors_headers
    return read(model_path, hf_overrides or {})
