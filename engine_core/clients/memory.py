"""The memory of unfinished requests, charged to the tenants and frontends that submitted them, and bounded.

    the core's limit <- a frontend <- one of its tenants <- requests

Each may take half of what the others beside it leave. So a frontend that takes all it can leaves as much free, of
which the next one may take half: none locks others out, and all together never exceed the limit. These are the
dynamic thresholds of "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches" (Choudhury, Hahne 1998).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from pagewire.engine_core.clients.footprint import RequestFootprint
from pagewire.ipc.errors import EngineBusyError

# Quarters of what the others leave. Requests that go on after a core was lost may take more: the first core had
# taken them, when perhaps fewer frontends had requests there, and their outputs have grown since.
NEW_QUARTERS, RESUMED_QUARTERS = 2, 3
Names: TypeAlias = tuple[Hashable, ...]


@dataclass(slots=True)
class Account:
    """What is charged to one frontend or tenant, or to all.

    parts: by identity of a part that requests share, its bytes and the number of these requests.
    num_charges: number of requests.
    """

    num_bytes: int = 0
    num_charges: int = 0
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def growth(self, footprint: RequestFootprint) -> int:
        """By how many bytes a request would make it larger."""
        return footprint.own_bytes + sum(size for part, size in footprint.parts if id(part) not in self.parts)

    def add(self, footprint: RequestFootprint) -> None:
        """Charge a request."""
        self.num_bytes += self.growth(footprint)
        self.num_charges += 1
        for part, size in footprint.parts:
            _, number = self.parts.get(id(part), (size, 0))
            self.parts[id(part)] = size, number + 1

    def remove(self, footprint: RequestFootprint) -> None:
        """Take a request back that was charged."""
        self.num_charges -= 1
        for part, _ in footprint.parts:
            size, number = self.parts.pop(id(part))
            if number > 1:
                self.parts[id(part)] = size, number - 1
        self.num_bytes -= self.growth(footprint)


@dataclass(frozen=True, slots=True, eq=False)
class Charge:
    """A request that is charged, until `release`, which is called once. The parts of its footprint live as long."""

    memory: Memory
    names: tuple[Names, ...]
    footprint: RequestFootprint

    def release(self) -> None:
        """Give the memory back."""
        self.memory.release(self)


class Memory:
    """The accounts of all frontends. max_bytes: of all requests together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._accounts: dict[Names, Account] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are charged."""
        return self._accounts[()].num_bytes if self._accounts else 0

    def __len__(self) -> int:
        """Number of accounts: those of no request are forgotten."""
        return len(self._accounts)

    def charge(
        self, frontend: Hashable, tenant: str, footprint: RequestFootprint, *, resumed: bool = False
    ) -> Charge:
        """Charge a request, if there is room for it. resumed: it goes on after another core was lost.

        Raises:
            ValueError: it would have no room in an idle engine either. EngineBusyError: there is no room now.
        """
        names: tuple[Names, ...] = ((), (frontend,), (frontend, tenant))
        accounts = [self._accounts.get(name) or Account() for name in names]
        quarters = RESUMED_QUARTERS if resumed else NEW_QUARTERS
        limit = idle_limit = self._max_bytes
        for outer, inner in pairwise(accounts):
            limit = (limit - outer.num_bytes + inner.num_bytes) * quarters // 4
            idle_limit = idle_limit * quarters // 4
        own = accounts[-1]
        if (growth := own.growth(footprint)) > idle_limit:
            raise ValueError(
                f"the request takes {growth:,} bytes of memory, and one may take {idle_limit:,}: give it fewer "
                "tokens or parameters"
            )
        if own.num_bytes + growth > limit:
            whose = f"tenant {tenant!r}" if tenant else "this frontend"
            raise EngineBusyError(
                f"the request takes {growth:,} bytes of memory, and the unfinished ones of {whose} take "
                f"{own.num_bytes:,} of the {max(0, limit):,} that are its share now: wait until some have ended"
            )
        for name, account in zip(names, accounts, strict=True):
            account.add(footprint)
            self._accounts[name] = account
        return Charge(self, names, footprint)

    def release(self, charge: Charge) -> None:
        """Give back what was charged."""
        for name in charge.names:
            account = self._accounts[name]
            account.remove(charge.footprint)
            if not account.num_charges:
                del self._accounts[name]
