"""The TCP ports that a process may take for talking to other machines."""

from __future__ import annotations

import os

LAST_PORT = 65535


def first_port() -> int:
    """`PAGEWIRE_PORT`: the first port to try, before those after it. 0, for any, if it is not set.

    Raises:
        ValueError: it is no port.
    """
    text = os.environ.get("PAGEWIRE_PORT") or "0"
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise ValueError(f"PAGEWIRE_PORT must be a port, got {text!r}")
    return int(text)
