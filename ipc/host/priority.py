"""Whom the processor serves first: processes that answer, or work that can wait."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from contextlib import suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
# A thread that answers takes its turn soon if it asks for a short one. 0: as long as is usual, a few milliseconds.
SHORT_TURN_NS, USUAL_TURN_NS = 100_000, 0
# Numbers of Linux's system call, for which the C library has no function, by machine (asm/unistd.h).
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# sched_attr (linux/sched/types.h): size, policy, flags, nice, priority, runtime, deadline, period.
SCHED_ATTR = struct.Struct("=IIQiIQQQ")


def go_behind(niceness: int) -> None:
    """Lower the priority of this process by `niceness` steps of `nice`, and that of its session if it leads one.

    Linux compares the nice values of processes within a session only, where it schedules sessions as groups (see
    sched(7), "The autogroup feature"), so a session's own value is set, too. Turns are of the usual length again.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # the kernel has no such groups
            AUTOGROUP.write_text(str(niceness))
    take_usual_turns()


def take_short_turns() -> None:
    """Let this thread, and the threads and processes that it starts, run for short times, but soon once they wake.

    The share of the processor stays the same. Without this, threads that could run were seen to wait for up to 3 s,
    where Linux schedules sessions as groups and more threads run than there are processors. It does as asked from
    6.12 (see its sched-eevdf.rst); before, and on other machines, this has no effect.
    """
    _set_turn(SHORT_TURN_NS)


def take_usual_turns() -> None:
    """Undo `take_short_turns` of a parent: this process computes, with threads that wait for each other."""
    _set_turn(USUAL_TURN_NS)


def _set_turn(nanoseconds: int) -> None:
    call = SCHED_SETATTR.get(platform.machine())
    if call is None or os.sched_getscheduler(0) != os.SCHED_OTHER:  # somebody has chosen another policy
        return
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = SCHED_ATTR.pack(SCHED_ATTR.size, os.SCHED_OTHER, 0, niceness, 0, nanoseconds, 0, 0)
    ctypes.CDLL(None).syscall(call, 0, attributes, 0)  # refused: it stays as it was
