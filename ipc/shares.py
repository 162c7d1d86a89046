"""The shares of tenants in something that they have in common, and which of two is next.

The least served tenant is next. Its measure is a virtual counter, as in "Fairness in Serving Large Language Models"
(Sheng et al., 2024): it grows by what the tenant is given. A tenant that begins to wait is raised to the least
served of those that wait already, so that none saves up a share that it did not use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Name: TypeAlias = str | bytes

MAX_IDLE = 256  # tenants without unfinished work that are remembered, for their counters


@dataclass(slots=True, eq=False)
class Share:
    """The share of one tenant in what is served.

    name: given by the frontend; bytes: the frontend's identity, for requests without a name.
    num_waiting, num_running: its work that waits, and that is being done.
    raised: what `served` has beyond what it was given, because the tenant began to wait later than others.
    """

    name: Name
    num_waiting: int = 0
    num_running: int = 0
    raised: float = 0

    @property
    def served(self) -> float:
        """The virtual counter: the tenant with the least is next."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """True while the tenant has no unfinished work."""
        return not (self.num_waiting or self.num_running)


S = TypeVar("S", bound=Share)


class Shares(Generic[S]):
    """The shares of every tenant with unfinished work, and of some without: their number is bounded.

    new: makes the share of a tenant that is not known.
    """

    def __init__(self, new: Callable[[Name], S]) -> None:
        self._new = new
        self._shares: dict[Name, S] = {}
        self._room = MAX_IDLE
        self._floor: float = 0

    def __iter__(self) -> Iterator[S]:
        return iter(self._shares.values())

    def __len__(self) -> int:
        return len(self._shares)

    def get(self, name: Name) -> S:
        """The share of the tenant of this name."""
        share = self._shares.get(name)
        if share is None:
            if len(self._shares) >= self._room:
                self._forget()
            share = self._shares[name] = self._new(name)
        return share

    def enter(self, share: S, waiting: Iterable[S]) -> None:
        """Raise a tenant that begins to wait to the least served of `waiting`, which wait already.

        If none does, to what the tenant had been served that was selected last.
        """
        floor = min((other.served for other in waiting), default=self._floor)
        share.raised += max(0, floor - share.served)

    def selected(self, share: S) -> None:
        """Record that the tenant is given something, before that is counted."""
        self._floor = max(self._floor, share.served)

    def _forget(self) -> None:
        """Forget the least served half of the idle tenants: when they return, they are raised anyway."""
        idle = sorted((share for share in self if share.idle), key=lambda share: share.served)
        for share in idle[: (len(idle) + 1) // 2]:
            del self._shares[share.name]
        self._room = MAX_IDLE + sum(not share.idle for share in self)


def num_before(own: int, num_tenants: int, total: int) -> int:
    """How full a queue is for a tenant: if full for others, it still has an equal share of the room.

    own: its entries. num_tenants: that have entries, with this one. total: all entries.
    """
    return min(total, own * num_tenants)


def share_of(limit: int, total: int, own: int, quarters: int = 2) -> int:
    """The largest part of `limit` that one of several users may hold: `quarters` quarters of what the others leave.

    total: what all have. own: what it has of that. All together never exceed the limit, and a new one finds room.
    """
    return (limit - total + own) * quarters // 4
