"""Signs of progress while a worker starts, or runs a call that may take longer than a step: a thread sends them.

It compares the processor time and the bytes read and written of all processes of the worker's group, compilers
included. Work that waits for ever (a dead network disk, a lock) gives no sign, although this thread runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

INTERVAL_SECONDS = 2.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
BYTES_PER_TICK = 1 << 16  # reading or writing this much counts as a tick of processor time
MIN_WORK = 6  # ticks in an interval; fewer are the noise of looking


def work_done(group: int) -> int:
    """A number that grows with the work of a process group: processor ticks, and bytes read and written."""
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            total += work_of(folder, group)
    return total


def work_of(folder: Path, group: int) -> int:
    """The work of the process with this folder in /proc; 0 if it is of another group, or has ended."""
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        if int(fields[2]) != group:
            return 0
        ticks = sum(map(int, fields[11:15]))  # of its own, and of children that have ended
    except (OSError, ValueError, LookupError):
        return 0
    return ticks + bytes_moved(folder) // BYTES_PER_TICK


def bytes_moved(folder: Path) -> int:
    """Bytes that the process with this folder in /proc has read and written; 0 where the system does not tell."""
    try:
        counts = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
        return sum(int(counts[name]) for name in ("rchar", "read_bytes", "wchar", "write_bytes"))
    except (OSError, ValueError, LookupError):
        return 0


class ProgressSigns:
    """Calls `send` from a thread, every two seconds in which work was done; use with `with`."""

    def __init__(self, send: Callable[[], None], interval: float = INTERVAL_SECONDS) -> None:
        self._send, self._interval = send, interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress-signs", daemon=True)

    def __enter__(self) -> ProgressSigns:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the thread, so that it sends nothing any more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        group = os.getpgrp()
        before = work_done(group) - own_ticks()
        while not self._over.wait(self._interval):
            now = work_done(group) - own_ticks()
            if now - before >= MIN_WORK:
                self._send()
            before = now


def own_ticks() -> int:
    """Processor ticks of the calling thread, whose looking is not work."""
    return int(time.thread_time() * TICKS_PER_SECOND)
