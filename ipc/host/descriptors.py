"""File descriptors: the most that this process may have, and some kept for what must not fail for want of them."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

MOST_DESCRIPTORS = (
    1 << 16
)  # more are not asked for: some programs do work for each descriptor that they may have


def descriptor_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def num_open_descriptors() -> int:
    """How many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # without that of the folder itself


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files towards the hard one: shells often set a low one, of 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # of a sandbox
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def require_descriptors(needed: int, who: str) -> None:
    """Raise ValueError if this process may have fewer open files than `who` needs."""
    if (limit := descriptor_limit()) < needed:
        raise ValueError(
            f"{who} needs at least {needed} open files, and this process may have {limit}: raise the hard limit "
            "(ulimit -Hn)"
        )


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
