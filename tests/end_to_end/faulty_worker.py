"""A real worker that dies or stops itself at a phase of a collective, once for each order that it gets.

An order is the file `$FAULT_ORDER` with "RANK PHASE SIGNAL". Phases: `before` and `after` an `all_reduce`, and `in`
it, while the rank waits for another one, which never comes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from pagewire.kernels.cpu.collective import SharedMemoryGroup
from pagewire.workers import main, runner
from pagewire.workers.batch import Batch

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
        os.kill(os.getpid(), int(number))
    if ordered == "in" and int(rank) != group.rank and phase == "before":
        threading.Event().wait()  # the rank that the order is for waits for this one


def watch(group: SharedMemoryGroup) -> None:
    """Obey orders for the inside of an operation: while this rank sleeps there, as the other does not come."""
    sleepers = ctypes.c_uint32.from_address(group.group.region + POST_BYTES * (1 - group.rank) + SLEEPERS)
    while True:
        signal.sigtimedwait([], 0.002)
        if sleepers.value:
            obey(group, "in")


class FaultyGroup(SharedMemoryGroup):
    """A group of two whose sums fail as ordered."""

    _watcher: threading.Thread | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=watch, args=[self], daemon=True)
            self._watcher.start()
        obey(self, "before")
        total = super().all_reduce(x)
        obey(self, "after")
        return total


def summed(forward: Any) -> Any:
    """A forward pass whose result goes through a sum over the ranks; halves of equal numbers are exact."""

    def run(self: runner.Runner, batch: Batch) -> Tensor:
        hidden = forward(self, batch)
        return self.collective.all_reduce(hidden).mul_(1 / self.collective.size)

    return run


if __name__ == "__main__":
    from pagewire.workers.collective import open as opening

    opening.SharedMemoryGroup = FaultyGroup  # type: ignore[misc]
    runner.Runner._forward = summed(runner.Runner._forward)  # type: ignore[method-assign]
    sys.exit(main.main())
