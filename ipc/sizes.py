"""Sizes of memory as text, such as 20GiB."""

from __future__ import annotations

import re

UNITS = {"GIB": 1 << 30, "MIB": 1 << 20, "GB": 10**9, "MB": 10**6}
MOST_BYTES = 1 << 44  # 16 TiB


def size_in_bytes(name: str, text: str) -> int:
    """The bytes that a size says. name: of the option, for the error.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s?([A-Za-z]{2,3})", text, re.ASCII)
    unit = UNITS.get(match[2].upper()) if match else None
    num_bytes = int(float(match[1]) * unit) if match and unit else 0
    if not 0 < num_bytes <= MOST_BYTES:
        raise ValueError(
            f"{name} must be a size such as 80GiB, 81559MiB or 24GB, up to 16384GiB, got {text[:40]!r}"
        )
    return num_bytes
