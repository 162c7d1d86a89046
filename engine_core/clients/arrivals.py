"""What was read from the socket and has to wait: requests, and the calls behind them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pagewire.engine_core.clients.clients import AttachedClient
from pagewire.ipc.wire.messages import Call
from pagewire.ipc.wire.requests import Request
from pagewire.ipc.wire.window import Load

MAX_REQUESTS = 8192
MAX_BYTES = 8 << 20  # of the messages that they came in; in memory they take several times as much
MAX_CALLS = 1024

Owner: TypeAlias = tuple[int, str]
"""The number of a frontend and its tenant."""


class Arrival(NamedTuple):
    """A request, whose it is, its part of the bytes of its message, and how many requests came before it."""

    client: AttachedClient
    request: Request
    num_bytes: int
    number: int


@dataclass(slots=True)
class ArrivalQueue:
    """Requests of one owner in order, of which there is at least one. load: all of them, as `ipc.window` counts."""

    arrivals: deque[Arrival] = field(default_factory=deque)
    load: Load = field(default_factory=Load)


class Arrivals:
    """Gives out one request of each tenant in turn.

    So a tenant with one prompt does not wait for the thousand prompts of another tenant. A call waits for the
    requests that its frontend sent before it.
    """

    def __init__(self) -> None:
        self._queues: dict[Owner, ArrivalQueue] = {}  # the first is next
        # Each with the number of requests that came before it.
        self._calls: list[tuple[AttachedClient, Call, int]] = []
        self._total = Load()
        self._num_added = 0

    def __len__(self) -> int:
        """The number of requests."""
        return self._total.num_requests

    @property
    def full(self) -> bool:
        """True while no further message should be read."""
        return (
            self._total.num_requests >= MAX_REQUESTS
            or self._total.num_bytes >= MAX_BYTES
            or len(self._calls) >= MAX_CALLS
        )

    def admits(self, client: AttachedClient, requests: Sequence[Request], num_bytes: int) -> bool:
        """Whether a frontend may have sent a message with these requests now; see `ipc.window`."""
        for tenant, count in Counter(request.tenant for request in requests).items():
            queue = self._queues.get((client.number, tenant))
            if queue is not None and not queue.load.admits(count, num_bytes // len(requests) * count):
                return False
        return True

    def add(self, client: AttachedClient, requests: Sequence[Request], num_bytes: int) -> None:
        """Keep the requests of a message of this size."""
        size = num_bytes // max(1, len(requests))
        for request in requests:
            queue = self._queues.setdefault((client.number, request.tenant), ArrivalQueue())
            queue.arrivals.append(Arrival(client, request, size, self._num_added))
            queue.load.add(1, size)
            self._total.add(1, size)
            self._num_added += 1

    def add_call(self, client: AttachedClient, call: Call) -> None:
        """Keep a call."""
        self._calls.append((client, call, self._num_added))

    def pop(self) -> tuple[AttachedClient, Request]:
        """The request whose turn it is.

        Raises:
            StopIteration: there is none.
        """
        owner, queue = next(iter(self._queues.items()))
        arrival = queue.arrivals.popleft()
        del self._queues[owner]
        self._left(owner, queue, [arrival])  # behind the others
        return arrival.client, arrival.request

    def pop_calls(self) -> list[tuple[AttachedClient, Call]]:
        """The calls before which no request is left, in order of arrival."""
        if not self._calls:
            return []
        oldest: dict[int, int] = {}  # by frontend; those of one tenant are in order
        for (frontend, _), queue in self._queues.items():
            oldest[frontend] = min(queue.arrivals[0].number, oldest.get(frontend, self._num_added))
        due, waiting = [], []
        for client, call, number in self._calls:
            if oldest.get(client.number, number) >= number:
                due.append((client, call))
            else:
                waiting.append((client, call, number))
        self._calls = waiting
        return due

    def remove(self, client: AttachedClient, keys: Container[int]) -> list[Request]:
        """Give back those of a frontend's requests that have these keys."""
        removed = []
        for owner in [owner for owner in self._queues if owner[0] == client.number]:
            queue = self._queues[owner]
            leaving = [arrival for arrival in queue.arrivals if arrival.request.key in keys]
            queue.arrivals = deque(arrival for arrival in queue.arrivals if arrival.request.key not in keys)
            self._left(owner, queue, leaving)
            removed += [arrival.request for arrival in leaving]
        return removed

    def _left(self, owner: Owner, queue: ArrivalQueue, arrivals: Sequence[Arrival]) -> None:
        """Count requests that were taken out of a queue. An empty one goes; else it stays, or is now the last."""
        num_bytes = sum(arrival.num_bytes for arrival in arrivals)
        for load in (queue.load, self._total):
            load.add(-len(arrivals), -num_bytes)
        if queue.load:
            self._queues[owner] = queue
        else:
            self._queues.pop(owner, None)
