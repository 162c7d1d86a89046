"""Where compiled kernels are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`kernels` in `$PAGEWIRE_CACHE_ROOT`, by default in `$XDG_CACHE_HOME/pagewire` or `~/.cache/pagewire`."""
    if root := os.environ.get("PAGEWIRE_CACHE_ROOT"):
        return Path(root) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagewire" / "kernels"
