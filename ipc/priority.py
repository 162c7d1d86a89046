"""Lets work that can wait go behind the processes that serve."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def go_behind(niceness: int) -> None:
    """Lower the priority of this process, which leads its session, by `niceness` steps of `nice`.

    Linux compares the nice values of processes within a session only, where it schedules sessions as groups (see
    sched(7), "The autogroup feature"). So the session's own value is set, too.
    """
    os.nice(niceness)
    with suppress(OSError):  # the kernel has no such groups
        AUTOGROUP.write_text(str(niceness))
