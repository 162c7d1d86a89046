"""Fields of a `quantization_config`, which anybody may have written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pagewire.workers.errors import LoadError


def integer_setting(config: Mapping[str, Any], names: Iterable[str], default: int) -> int:
    """The first of these fields that is set.

    Raises:
        LoadError: it is no integer.
    """
    for name in names:
        if (value := config.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise LoadError(f"quantization_config: {name} must be an integer, not {value!r}")
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
        raise LoadError(f"quantization_config: {name} must be true or false, not {value!r}")
    return value


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression of names of modules.

    Raises:
        LoadError: it cannot be compiled.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise LoadError(f"quantization_config: {text!r} is no regular expression: {error}") from error
