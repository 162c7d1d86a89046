"""A queue of work for threads, in which the tenant is next that has used least of the threads' time.

Tenants are those of a frontend: the frontend is next that has used least, then that one of its tenants. So a
frontend gains nothing by the number of its tenants, whose names are its own word.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.shares import Name, Share, Shares, num_before

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True, eq=False)
class ThreadTime(Share):
    """The time of threads that was used, in seconds; that of running work is added when it is done."""

    seconds: float = 0.0

    @property
    def served(self) -> float:
        """The virtual counter, in seconds."""
        return self.raised + self.seconds


@dataclass(slots=True, eq=False)
class FrontendTime(ThreadTime):
    """That of one frontend. tenants: its tenants."""

    tenants: Shares[TenantTime] = field(init=False)

    def __post_init__(self) -> None:
        self.tenants = Shares(lambda name: TenantTime(name, frontend=self))


@dataclass(slots=True, eq=False, kw_only=True)
class TenantTime(ThreadTime):
    """That of one tenant of a frontend."""

    frontend: FrontendTime

    def both(self) -> tuple[ThreadTime, ThreadTime]:
        """Its own, and its frontend's."""
        return self, self.frontend


class FairQueue(Generic[T]):
    """Work that waits for one of several threads, for one tenant or several. Thread-safe.

    Threads take work from it (`turn`), or wait there until they may do their own (`place`).

    lock: held while the queue changes, also in `begin` of `turn`; None: a lock of its own.
    num_per_tenant: the most pieces of work of one tenant that are done at a time.
    num_places: the most pieces of work that are done at a time.
    num_reserved: of these places, those that are left to tenants of which nothing is being done, so that slow work
    of one does not hold up another that comes later.
    """

    def __init__(
        self,
        lock: threading.RLock | None = None,
        num_per_tenant: float = math.inf,
        num_places: float = math.inf,
        num_reserved: int = 0,
    ) -> None:
        self._num_per_tenant, self._num_places, self._num_reserved = num_per_tenant, num_places, num_reserved
        self._changed = threading.Condition(lock)
        self._frontends = Shares(FrontendTime)
        self._waiting: dict[TenantTime, dict[T, tuple[int, int]]] = {}  # their places; none is empty
        self._num_running = 0
        self._order = count()

    def num_before(self, tenant: Name, frontend: Name = "") -> int:
        """Number of unfinished items before a new one: fewer for a tenant with less than an equal share."""
        with self._changed:
            group = self._frontends.get(frontend)
            own = group.tenants.get(tenant)
            return before(self._frontends, group, before(group.tenants, own, num_unfinished(own)))

    def put(self, work: T, tenant: Name, size: int = 0, frontend: Name = "") -> None:
        """Let work wait in the turn of a tenant; of its own, the smallest goes first.

        It may wait in the turns of several tenants; then it is done in the first of these, once.
        """
        with self._changed:
            group = self._frontends.get(frontend)
            share = group.tenants.get(tenant)
            if not group.num_waiting:
                self._frontends.enter(group, (other.frontend for other in self._waiting))
            if share not in self._waiting:
                group.tenants.enter(share, (other for other in self._waiting if other.frontend is group))
                self._waiting[share] = {}
            self._waiting[share].setdefault(work, (size.bit_length(), next(self._order)))
            self._recount(share)

    def remove(self, work: T) -> None:
        """Take work out of the queue before its turn."""
        with self._changed:
            for share in [share for share, places in self._waiting.items() if work in places]:
                del self._waiting[share][work]
                self._recount(share)
                if not self._waiting[share]:
                    del self._waiting[share]

    @contextmanager
    def turn(self, begin: Callable[[T], bool]) -> Iterator[T]:
        """A context in which a thread does the next work. Blocks until there is some.

        begin: called with work that is taken out of the queue; False: it is not wanted any more.
        """
        with self._changed:
            work, share = self._take(begin)
        with self._timed(share):
            yield work

    @contextmanager
    def place(self, tenant: Name, seconds: float) -> Iterator[None]:
        """A context in which the calling thread does work of its own, in the turn of a tenant.

        Raises:
            EngineBusyError: the turn has not come within `seconds`.
        """
        ticket: Any = object()
        with self._changed:
            self.put(ticket, tenant)
            try:
                if not self._changed.wait_for(lambda: self._is_next(ticket), seconds):
                    raise EngineBusyError(f"waited {seconds:g} s for other jobs to end")
                share = next(share for share, places in self._waiting.items() if ticket in places)
                self._begin(share)
            finally:
                self.remove(ticket)
        with self._timed(share):
            yield

    def _is_next(self, work: T) -> bool:
        found = self._next()
        return found is not None and found[0] is work

    def _next(self) -> tuple[T, TenantTime] | None:
        """The work whose turn it is, and whose it is; None if none may be done now."""
        able = [share for share in self._waiting if self._may_begin(share)]
        if not able:
            return None
        share = min(able, key=lambda each: (each.frontend.served, each.served, each.num_running))
        places = self._waiting[share]
        return min(places, key=places.__getitem__), share

    def _may_begin(self, share: TenantTime) -> bool:
        num_free = self._num_places - self._num_running
        least = self._num_reserved if share.num_running else 0
        return num_free > least and share.num_running < self._num_per_tenant

    def _take(self, begin: Callable[[T], bool]) -> tuple[T, TenantTime]:
        while True:
            found = self._next()
            if found is None:
                self._changed.wait()
                continue
            work, share = found
            self.remove(work)
            if begin(work):
                self._begin(share)
                return work, share

    def _begin(self, share: TenantTime) -> None:
        """Count work of a tenant that begins."""
        self._num_running += 1
        for each in share.both():
            each.num_running += 1
        share.frontend.tenants.selected(share)
        self._frontends.selected(share.frontend)

    @contextmanager
    def _timed(self, share: TenantTime) -> Iterator[None]:
        """A context in which work of a tenant is done."""
        since = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                for each in share.both():
                    each.num_running -= 1
                    each.seconds += time.monotonic() - since
                self._changed.notify_all()

    def _recount(self, share: TenantTime) -> None:
        """Count what waits for a tenant, of which some came or went."""
        change = len(self._waiting[share]) - share.num_waiting
        for each in share.both():
            each.num_waiting += change
        self._changed.notify_all()


def num_unfinished(share: Share) -> int:
    """The work of a share that waits, and that is being done."""
    return share.num_waiting + share.num_running


def before(shares: Iterable[Share], own: Share, number: int) -> int:
    """`num_before` for one of `shares`, of which `number` items count."""
    busy = {share for share in shares if not share.idle}
    return num_before(number, len({*busy, own}), sum(map(num_unfinished, busy)))
