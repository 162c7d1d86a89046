"""Environment variables as values."""

from __future__ import annotations

import os


def env_flag(name: str) -> bool:
    """True if an environment variable is "1", False if it is "0", empty or not set.

    Raises:
        ValueError: it is something else.
    """
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def env_float(name: str, default: float) -> float:
    """The number in an environment variable, or `default` if it is not set.

    Raises:
        ValueError: the variable is not a number.
    """
    text = os.environ.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
