"""Compiled kernels that a wheel brings along, so that nothing compiles on the machine where it is installed.

A library lies in `FOLDER` under a name that ends in a hash of what it was made of. That name is computed from the
sources of the same installation, so a library of other sources is never found. Its files are trusted as our Python
files are: whoever may write to the one may write to the other.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "compiled"
"""`pagewire/kernels/compiled`; a checkout and the pure wheel have no such folder."""


def read(name: str) -> bytes | None:
    """The content of a library that came with the wheel; None if there is none of this name."""
    try:
        return (FOLDER / name).read_bytes()
    except OSError:
        return None
