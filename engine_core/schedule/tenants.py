"""The tenants that share the scheduler: what each was given, and which of two is next.

The least served tenant is next. Its measure is the virtual counter of tokens of "Fairness in Serving Large Language
Models" (Sheng et al., 2024): it grows by each prompt token that an admission has to compute, and by each output
token. A tenant that begins to wait is raised to the least served of those that wait already, so that none saves
up a share that it did not use.

A request without a tenant belongs to the frontend that submitted it. So with one frontend and no names there is one
tenant, and sequences are served in order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

Name: TypeAlias = str | bytes

MAX_IDLE = 256  # tenants without unfinished sequences that are remembered, for their counters
PASSES = 64  # later sequences that may pass each further sequence of a batch


@dataclass(slots=True, eq=False)
class Tenant:
    """What the scheduler keeps of one tenant.

    name: given by the frontend; bytes: the frontend's identity, for requests without a name.
    num_waiting, num_running: its sequences in the queue and in slots.
    num_requests, num_prompt_tokens, num_output_tokens: counts since the tenant is known; prompt tokens without
        those found in the cache, and once for a sequence, however often it is preempted.
    raised: what `served` has beyond tokens, because the tenant began to wait later than others.
    clock: the place in its own order at which its next request queues.
    """

    name: Name
    num_waiting: int = 0
    num_running: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    raised: int = 0
    clock: int = 0

    @property
    def served(self) -> int:
        """The virtual counter: the tenant with the least is next."""
        return self.raised + self.num_prompt_tokens + self.num_output_tokens

    @property
    def idle(self) -> bool:
        """True while no sequence of the tenant is scheduled."""
        return not (self.num_waiting or self.num_running)

    def turn(self, rank: int) -> int:
        """The place in the tenant's order of a new request with `rank` sequences of its batch before it.

        A batch queues as if its sequences came one by one, `PASSES` others apart. So a later request passes the end
        of a batch, and each sequence of a batch is passed by a bounded number.
        """
        return self.clock + PASSES * rank

    def admit(self, turn: int, num_tokens: int) -> None:
        """Count the admission of a sequence at place `turn`, with `num_tokens` prompt tokens to compute."""
        self.num_running += 1
        self.num_prompt_tokens += num_tokens
        self.clock = max(self.clock, turn) + 1


class Tenants:
    """Every tenant with sequences, and some of those without: their number is bounded."""

    def __init__(self) -> None:
        self._tenants: dict[Name, Tenant] = {}
        self._room = MAX_IDLE
        self._floor = 0

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def __len__(self) -> int:
        return len(self._tenants)

    def get(self, name: Name) -> Tenant:
        """The tenant of this name."""
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._room:
                self._forget()
            tenant = self._tenants[name] = Tenant(name)
        return tenant

    def enter(self, tenant: Tenant, waiting: Iterable[Tenant]) -> None:
        """Raise a tenant that begins to wait to the least served of `waiting`, which wait already.

        If none does, to what the tenant had been served that was admitted last.
        """
        floor = min((other.served for other in waiting), default=self._floor)
        tenant.raised += max(0, floor - tenant.served)

    def selected(self, tenant: Tenant) -> None:
        """Record that a sequence of this tenant is admitted, before its tokens are counted."""
        self._floor = max(self._floor, tenant.served)

    def _forget(self) -> None:
        """Forget the least served half of the idle tenants: when they return, they are raised anyway."""
        idle = sorted((tenant for tenant in self if tenant.idle), key=lambda tenant: tenant.served)
        for tenant in idle[: (len(idle) + 1) // 2]:
            del self._tenants[tenant.name]
        self._room = MAX_IDLE + sum(not tenant.idle for tenant in self)
