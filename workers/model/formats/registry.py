"""The formats of quantised checkpoints by the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagewire.workers.errors import LoadError
from pagewire.workers.model.formats.format import Format

READERS: dict[str, Callable[[Mapping[str, Any]], Format]] = {}
"""`quant_method` to a function from `quantization_config` to a format."""


def format_of(quantization_config: Mapping[str, Any]) -> Format:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        LoadError: the method is unknown, or this kind of it is not served.
    """
    method = quantization_config.get("quant_method")
    if (reader := READERS.get(str(method))) is None:
        raise LoadError(
            f"checkpoints quantised by {method!r} are not served; those of {', '.join(READERS)} are"
        )
    return reader(quantization_config)
