"""File descriptors: the most that this process may have, and some kept for what must not fail for want of them."""

from __future__ import annotations

import os
import resource
from contextlib import suppress


def raise_limit() -> None:
    """Raise this process's limit of open files to the highest that it may set."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems refuse "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class SpareDescriptors:
    """Open files that are closed when their descriptors are needed elsewhere."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._fds: list[int] = []
        self.refill()

    def release(self) -> None:
        """Free the descriptors."""
        while self._fds:
            os.close(self._fds.pop())

    def refill(self) -> None:
        """Take them again, as many as there are."""
        with suppress(OSError):
            while len(self._fds) < self._count:
                self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
