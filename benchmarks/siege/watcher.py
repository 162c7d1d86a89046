"""The watch on the processes under siege: their memory, and whether they live."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable

import psutil

from .fortress import JOB, Fortress

SAMPLE_SECONDS = 0.25
GROWTH_MIB = 300.0  # most that server, core and worker together may grow
MEMORY_LIMIT_MIB = (
    3000.0  # of jobs, and of all others: over it the siege is called off, for the machine's sake
)
KILL_SECONDS = 30.0  # between two kills of workers, on average
LAG_SECONDS = 0.05  # between two looks whether this process is awake


class Watcher:
    """Samples the processes of a fortress.

    before, peak: MiB by role, at the beginning and at most; role "all" is the sum without jobs, which have
    limits of their own. deaths: processes that have ended, which should not. kills: when workers were killed here.
    others: the part of the machine's processor time that processes outside of the siege took.
    """

    def __init__(self, fortress: Fortress) -> None:
        self._fortress = fortress
        self.before = self.sample()
        self.peak = dict(self.before)
        self.deaths: list[str] = []
        self.overflow = ""
        self.kills: list[float] = []
        self.others = 0.0
        self._usage = Usage()
        self.num_jobs = 0
        self._jobs: set[int] = set()
        self._pids = dict(fortress.pids)
        self._killed: set[int] = set()

    def sample(self) -> dict[str, float]:
        """Memory now, in MiB, by role."""
        sizes = self._fortress.memory()
        return sizes | {"all": sum(size for role, size in sizes.items() if role != JOB)}

    async def watch(self) -> None:
        """Sample until the server or the core has died, or memory is over the limit.

        In a thread, so that the client of this process does not wait for it.
        """
        while not (self.overflow or await asyncio.to_thread(self._look)):
            await asyncio.sleep(SAMPLE_SECONDS)

    def _look(self) -> bool:
        self.others = self._usage.share_of_others()
        sizes = self.sample()
        self.peak = {role: max(size, self.peak.get(role, 0.0)) for role, size in (self.peak | sizes).items()}
        if max(sizes["all"], sizes.get(JOB, 0.0)) > MEMORY_LIMIT_MIB:
            held = ", ".join(f"{role} {size:.0f}" for role, size in sizes.items())
            self.overflow = f"called off with this many MiB: {held}"
        roles = self._fortress.roles()
        self._jobs |= set(roles.get(JOB, ()))
        self.num_jobs = len(self._jobs)
        self._look_for_worker(roles.get("worker", []))
        for role in self._pids.keys() - {"worker"}:
            if self._pids[role] not in roles.get(role, []):
                self.deaths.append(f"the {role} (pid {self._pids[role]}) has died")
                return True
        return False

    def _look_for_worker(self, pids: list[int]) -> None:
        pid = self._pids["worker"]
        if pids and pid not in pids:
            if pid not in self._killed:
                self.deaths.append(f"the worker (pid {pid}) has died, and was replaced")
            self._pids["worker"] = pids[0]

    async def kill_workers(
        self, rng: random.Random, on_kill: Callable[[], None], serves: Callable[[], bool]
    ) -> None:
        """Kill the worker now and then, and one that does not serve yet half as often.

        A core rightly gives up where ten in a row are killed while they load, which on a busy machine takes long.
        """
        while True:
            await asyncio.sleep(KILL_SECONDS * (0.5 + rng.random()))
            pid, spared = self._pids["worker"], rng.random() < 0.5 and not serves()
            if not spared and pid in self._fortress.roles().get("worker", []) and pid not in self._killed:
                self._killed.add(pid)
                self.kills.append(time.monotonic())
                on_kill()
                os.kill(pid, signal.SIGKILL)

    @property
    def growth(self) -> float:
        """MiB by which server, core and worker have grown together, at their largest."""
        return self.peak["all"] - self.before["all"]


class Usage:
    """Processor time of this process with all that it started, and of the machine, since this object was made."""

    def __init__(self) -> None:
        self.num_processors = psutil.cpu_count() or 1
        self._begin, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()

    def since_begin(self) -> tuple[float, float]:
        """Seconds of processors that were busy at all, and that this process and its descendants used."""
        return busy_seconds() - self._busy, own_seconds() - self._own

    def share_of_others(self) -> float:
        """The part of the machine's processor time that other processes took: time that a server did not have."""
        busy, own = self.since_begin()
        return self.others(busy, own, time.monotonic() - self._begin)

    def others(self, busy: float, own: float, seconds: float) -> float:
        """The same, of these figures."""
        return max(0.0, busy - own) / (seconds * self.num_processors)


def busy_seconds() -> float:
    """Seconds that the machine's processors were busy so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def own_seconds() -> float:
    """Processor seconds of this process and its descendants, those that have ended and were waited for included."""
    this, total = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:
            pass  # it has ended meanwhile
    return total


class Lag:
    """How late this process wakes up: the waits of the client that are the machine's doing.

    times: from when to when it should have been awake, and was not, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.note(due, time.monotonic())

    def note(self, due: float, woke: float) -> None:
        """Note that this process should have been awake at `due`, and was at `woke`."""
        if woke - due > LAG_SECONDS:
            self.times.append((due, woke))

    @property
    def longest(self) -> float:
        """The longest of these times in seconds; 0 if none was noticed."""
        return max((woke - due for due, woke in self.times), default=0.0)

    def within(self, begin: float, end: float) -> float:
        """Seconds of this time in which this process should have been awake, and was not."""
        return sum(max(0.0, min(end, woke) - max(begin, due)) for due, woke in self.times)
