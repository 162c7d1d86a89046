"""One account for each tenant: what it was given says whose turn it is, and what it holds whether there is room.

Turns: the counter by which the least served tenant is next (`ipc.shares`) grows by each prompt token that an
admission has to compute, and by each output token. A request without a tenant belongs to the frontend that
submitted it. So with one frontend and no names there is one account, and sequences are served in order of arrival.

Room: unfinished requests are charged when they are taken, to all of

    the engine <- a frontend <- one of its tenants

Each may hold half of what the others beside it leave. So a frontend that takes all it can leaves as much free, of
which the next one may take half: none locks others out, and all together never exceed the limit. These are the
dynamic thresholds of "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches" (Choudhury, Hahne 1998).
Names of tenants are a frontend's own word, so a tenant holds apart what each frontend has submitted for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from pagewire.engine_core.schedule.attachments import Tenant
from pagewire.engine_core.tenants.weight import RequestWeight, weigh
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.shares import Name, Share, Shares, share_of
from pagewire.ipc.wire.requests import Request

PASSES = 64  # later sequences that may pass each further sequence of a batch
# Quarters of what the others leave. Requests that go on after a core was lost may take more: the first core had
# taken them, when perhaps fewer frontends had requests there, and their outputs have grown since.
NEW_QUARTERS, RESUMED_QUARTERS = 2, 3


@dataclass(slots=True, eq=False)
class Holding:
    """What unfinished requests hold together.

    num_bytes: memory. num_requests: number of these requests.
    parts: by identity of a part that requests share, its bytes and the number of these requests.
    """

    num_bytes: int = 0
    num_requests: int = 0
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def growth(self, weight: RequestWeight) -> int:
        """By how many bytes a request would make it larger."""
        return weight.own_bytes + sum(size for part, size in weight.parts if id(part) not in self.parts)

    def add(self, weight: RequestWeight) -> None:
        """Add a request."""
        self.num_bytes += self.growth(weight)
        self.num_requests += 1
        for part, size in weight.parts:
            _, number = self.parts.get(id(part), (size, 0))
            self.parts[id(part)] = size, number + 1

    def remove(self, weight: RequestWeight) -> None:
        """Remove a request that was added."""
        self.num_requests -= 1
        for part, _ in weight.parts:
            size, number = self.parts.pop(id(part))
            if number > 1:
                self.parts[id(part)] = size, number - 1
        self.num_bytes -= self.growth(weight)


@dataclass(slots=True, eq=False)
class Account(Share):
    """What one tenant was given and what it holds. Its work is sequences in the queue and in slots.

    num_requests, num_prompt_tokens, num_output_tokens: counts since the tenant is known; prompt tokens without
        those found in the cache, and once for a sequence, however often it is preempted.
    clock: the place in its own order at which its next request queues.
    held: by frontend, what the tenant's unfinished requests hold.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    clock: int = 0
    held: dict[Hashable, Holding] = field(default_factory=dict)

    @property
    def served(self) -> float:
        """The virtual counter, in tokens."""
        return self.raised + self.num_prompt_tokens + self.num_output_tokens

    @property
    def idle(self) -> bool:
        """True while the tenant has no unfinished request."""
        return not (self.num_waiting or self.num_running or self.held)

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


class Accounts(Shares[Account]):
    """The accounts of all tenants. max_bytes: that all unfinished requests may hold.

    Attributes:
        total: what they hold.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(Account)
        self.max_bytes = max_bytes
        self.total = Holding()
        self.frontends: dict[Hashable, Holding] = {}  # of those with unfinished requests

    def charge(self, frontend: Hashable, name: Name, request: Request) -> Callable[[], None]:
        """Charge a request that a frontend submits for a tenant of this name; returns and raises as `hold`."""
        known = self.get(name).held.get(frontend)
        weight = weigh(request, {} if known is None else known.parts)
        return self.hold(frontend, name, weight, resumed=request.output_token_ids is not None)

    def hold(
        self, frontend: Hashable, name: Name, weight: RequestWeight, *, resumed: bool = False
    ) -> Callable[[], None]:
        """Charge a request of this weight, if there is room for it. resumed: it goes on after a core was lost.

        Returns what gives it back, which keeps the parts of the weight until it was called, once.

        Raises:
            ValueError: it would have no room in an idle engine either. EngineBusyError: there is no room now.
        """
        account = self.get(name)
        own = account.held.get(frontend) or Holding()
        holdings = self.total, self.frontends.get(frontend) or Holding(), own
        quarters = RESUMED_QUARTERS if resumed else NEW_QUARTERS
        limit = idle_limit = self.max_bytes
        for outer, inner in pairwise(holdings):
            limit = share_of(limit, outer.num_bytes, inner.num_bytes, quarters)
            idle_limit = share_of(idle_limit, 0, 0, quarters)
        if (growth := own.growth(weight)) > idle_limit:
            raise ValueError(
                f"the request takes {growth:,} bytes of memory, and one may take {idle_limit:,}: give it fewer "
                "tokens or parameters"
            )
        if own.num_bytes + growth > limit:
            whose = f"tenant {name!r}" if isinstance(name, str) else "this frontend"
            raise EngineBusyError(
                f"the request takes {growth:,} bytes of memory, and the unfinished ones of {whose} take "
                f"{own.num_bytes:,} of the {max(0, limit):,} that are its share now: wait until some have ended"
            )
        for holding in holdings:
            holding.add(weight)
        _, self.frontends[frontend], account.held[frontend] = holdings
        return partial(self._release, frontend, account, weight)

    def _release(self, frontend: Hashable, account: Account, weight: RequestWeight) -> None:
        self.total.remove(weight)
        for holdings in (self.frontends, account.held):
            holding = holdings[frontend]
            holding.remove(weight)
            if not holding.num_requests:
                del holdings[frontend]


def account_of(tenant: Tenant) -> Account:
    """The account of a sequence's tenant."""
    assert isinstance(tenant, Account)
    return tenant
