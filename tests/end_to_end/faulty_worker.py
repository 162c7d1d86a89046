"""A real worker that dies or stops itself at a phase of a collective, once for each order that it gets.

An order is the file `$FAULT_ORDER` with "RANK PHASE SIGNAL". Phases: `before` and `after` an `all_reduce`, or in a
pipeline before and after the rank sends or receives, and `in` it, while the rank waits for another one, which never
comes. Signal 0: the rank lacks memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

from torch import Tensor

from pagewire.kernels.cpu.collective import SharedMemoryGroup
from pagewire.workers.process import main

ORDER = Path(os.environ["FAULT_ORDER"])
POST_BYTES, SLEEPERS = 64, 4  # of the shared region, see collective.cpp


def obey(group: SharedMemoryGroup, phase: str) -> None:
    """Do what the order says of this rank and phase."""
    try:
        rank, ordered, number = ORDER.read_text().split()
    except (OSError, ValueError):
        return
    if int(rank) == group.rank and ordered == phase:
        ORDER.unlink()
        if int(number) == 0:
            raise MemoryError("memory is short, as ordered")
        os.kill(os.getpid(), int(number))
    if ordered == "in" and int(rank) != group.rank and phase == "before":
        threading.Event().wait()  # the rank that the order is for waits for this one


def watch(group: SharedMemoryGroup, post: int) -> None:
    """Obey orders for the inside of an operation: while this rank sleeps there, as the other does not come.

    post: the address of that for which it sleeps.
    """
    sleepers = ctypes.c_uint32.from_address(post + SLEEPERS)
    while True:
        signal.sigtimedwait([], 0.002)
        if sleepers.value:
            obey(group, "in")


class FaultyGroup(SharedMemoryGroup):
    """A group of two whose sums, or what they send, fail as ordered."""

    _watcher: threading.Thread | None = None

    @property
    def native_all_reduce(self) -> tuple[int, int]:
        """None: compiled code, too, calls Python for each sum."""
        raise AttributeError("native_all_reduce")

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`."""
        if self._stages > 1:  # while the model is loaded
            return super().all_reduce(x)
        self._watch(self.group.region + POST_BYTES * (1 - self.rank))
        obey(self, "before")
        total = super().all_reduce(x)
        obey(self, "after")
        return total

    def send(self, x: Tensor, target: int) -> None:
        """See `Collective.send`."""
        obey(self, "before")
        super().send(x, target)
        obey(self, "after")

    def receive(self, x: Tensor, source: int) -> Tensor:
        """See `Collective.receive`."""
        self._watch(self._link(source, self.rank).region)
        obey(self, "before")
        received = super().receive(x, source)
        obey(self, "after")
        return received

    def _watch(self, post: int) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=watch, args=[self, post], daemon=True)
            self._watcher.start()


if __name__ == "__main__":
    from pagewire.workers.ranks import open as opening

    opening.SharedMemoryGroup = FaultyGroup  # type: ignore[misc]
    sys.exit(main.main())
