"""A queue of work for threads, in which the tenant is next that has used least of the threads' time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from pagewire.ipc.shares import Name, Share, Shares, num_before

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True, eq=False)
class ThreadTime(Share):
    """The time of threads that one tenant has used, in seconds; that of running work is added when it is done."""

    seconds: float = 0.0

    @property
    def served(self) -> float:
        """The virtual counter, in seconds."""
        return self.raised + self.seconds


class FairQueue(Generic[T]):
    """Work that waits for one of several threads, for one tenant or several. Thread-safe.

    lock: held while the queue changes, also in `begin` of `turn`; None: a lock of its own.
    num_per_tenant: the most pieces of work of one tenant that are done at a time.
    """

    def __init__(self, lock: threading.RLock | None = None, num_per_tenant: float = math.inf) -> None:
        self._num_per_tenant = num_per_tenant
        self._changed = threading.Condition(lock)
        self._times = Shares(ThreadTime)
        self._waiting: dict[ThreadTime, dict[T, tuple[int, int]]] = {}  # their places; none is empty
        self._order = count()

    def num_before(self, tenant: Name) -> int:
        """Number of unfinished items before a new one: fewer for a tenant with less than an equal share."""
        with self._changed:
            own = self._times.get(tenant)
            busy = {share for share in self._times if not share.idle}
            total = sum(share.num_waiting + share.num_running for share in busy)
            return num_before(own.num_waiting + own.num_running, len({*busy, own}), total)

    def put(self, work: T, tenant: Name, size: int = 0) -> None:
        """Let work wait in the turn of a tenant; of its own, the smallest goes first.

        It may wait in the turns of several tenants; then it is done in the first of these, once.
        """
        with self._changed:
            share = self._times.get(tenant)
            if share not in self._waiting:
                self._times.enter(share, self._waiting)
                self._waiting[share] = {}
            self._waiting[share].setdefault(work, (size.bit_length(), next(self._order)))
            share.num_waiting = len(self._waiting[share])
            self._changed.notify()

    def remove(self, work: T) -> None:
        """Take work out of the queue before its turn."""
        with self._changed:
            for share in [share for share, places in self._waiting.items() if work in places]:
                del self._waiting[share][work]
                share.num_waiting -= 1
                if not self._waiting[share]:
                    del self._waiting[share]

    @contextmanager
    def turn(self, begin: Callable[[T], bool]) -> Iterator[T]:
        """A context in which a thread does the next work. Blocks until there is some.

        begin: called with work that is taken out of the queue; False: it is not wanted any more.
        """
        with self._changed:
            work, share = self._take(begin)
            share.num_running += 1
            self._times.selected(share)
        since = time.monotonic()
        try:
            yield work
        finally:
            with self._changed:
                share.num_running -= 1
                share.seconds += time.monotonic() - since
                self._changed.notify()

    def _take(self, begin: Callable[[T], bool]) -> tuple[T, ThreadTime]:
        while True:
            able = [share for share in self._waiting if share.num_running < self._num_per_tenant]
            if not able:
                self._changed.wait()
                continue
            share = min(able, key=lambda each: (each.served, each.num_running))
            places = self._waiting[share]
            work = min(places, key=places.__getitem__)
            self.remove(work)
            if begin(work):
                return work, share
