"""Fields of a `quantization_config`, which anybody may have written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pagewire.ipc.quoting import quoted
from pagewire.workers.errors import LoadError
from pagewire.workers.name_patterns import MatchTime, NamePattern


def integer_setting(config: Mapping[str, Any], names: Iterable[str], default: int) -> int:
    """The first of these fields that is set.

    Raises:
        LoadError: it is no integer.
    """
    for name in names:
        if (value := config.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise LoadError(f"quantization_config: {name} must be an integer, not {quoted(value)}")
            return value
    return default


def switch(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false.

    Raises:
        LoadError: it is neither.
    """
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise LoadError(f"quantization_config: {name} must be true or false, not {quoted(value)}")
    return value


def pattern(text: str) -> NamePattern:
    """A regular expression of names of modules.

    Raises:
        LoadError: it cannot be compiled.
    """
    each_only = MatchTime(math.inf)  # a name is matched several times while a model is loaded
    return NamePattern(text, "quantization_config", each_only)
