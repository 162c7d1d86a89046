"""The folder of compiled kernels."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def cache_folder() -> Path:
    """`kernels` in `$PAGEWIRE_CACHE_ROOT`, by default in `$XDG_CACHE_HOME/pagewire` or `~/.cache/pagewire`."""
    if root := os.environ.get("PAGEWIRE_CACHE_ROOT"):
        return Path(root) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagewire" / "kernels"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context in which no other process or thread has the lock of a folder; the folder itself is the lock file.

    Where the file system has no locks, there is none, and processes may compile the same kernels side by side.

    Raises:
        OSError: the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
