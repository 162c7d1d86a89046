"""What was read from the socket and has to wait: requests, and the calls behind them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Sequence
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


class Arrivals:
    """Gives out one request of each tenant in turn.

    So a tenant with one prompt does not wait for the thousand prompts of another tenant. A call waits for the
    requests that its frontend sent before it.
    """

    def __init__(self) -> None:
        self._queues: dict[Owner, deque[Arrival]] = {}  # none is empty; the first is next
        self._loads: dict[Owner, Load] = {}  # of those with a queue
        self._calls: list[
            tuple[AttachedClient, Call, int]
        ] = []  # each with the number of requests that came before it
        self._num_added = 0
        self._num_requests = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        """The number of requests."""
        return self._num_requests

    @property
    def full(self) -> bool:
        """True while no further message should be read."""
        return (
            self._num_requests >= MAX_REQUESTS
            or self._num_bytes >= MAX_BYTES
            or len(self._calls) >= MAX_CALLS
        )

    def admits(self, client: AttachedClient, requests: Sequence[Request], num_bytes: int) -> bool:
        """Whether a frontend may have sent a message with these requests now; see `ipc.window`."""
        for tenant, count in Counter(request.tenant for request in requests).items():
            load = self._loads.get((client.number, tenant))
            if load is not None and not load.admits(count, num_bytes // len(requests) * count):
                return False
        return True

    def add(self, client: AttachedClient, requests: Sequence[Request], num_bytes: int) -> None:
        """Keep the requests of a message of this size."""
        for request in requests:
            arrival = Arrival(client, request, num_bytes // len(requests), self._num_added)
            self._queues.setdefault((client.number, request.tenant), deque()).append(arrival)
            self._num_added += 1
            self._count(arrival, 1)

    def add_call(self, client: AttachedClient, call: Call) -> None:
        """Keep a call."""
        self._calls.append((client, call, self._num_added))

    def pop(self) -> tuple[AttachedClient, Request]:
        """The request whose turn it is.

        Raises:
            StopIteration: there is none.
        """
        owner, queue = next(iter(self._queues.items()))
        arrival = queue.popleft()
        del self._queues[owner]
        if queue:
            self._queues[owner] = queue  # behind the others
        self._count(arrival, -1)
        return arrival.client, arrival.request

    def pop_calls(self) -> list[tuple[AttachedClient, Call]]:
        """The calls before which no request is left, in order of arrival."""
        if not self._calls:
            return []
        oldest: dict[int, int] = {}  # by frontend; those of one tenant are in order
        for (frontend, _), queue in self._queues.items():
            oldest[frontend] = min(queue[0].number, oldest.get(frontend, self._num_added))
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
            kept: deque[Arrival] = deque()
            for arrival in self._queues[owner]:
                if arrival.request.key in keys:
                    removed.append(arrival.request)
                    self._count(arrival, -1)
                else:
                    kept.append(arrival)
            if kept:
                self._queues[owner] = kept
            else:
                del self._queues[owner]
        return removed

    def _count(self, arrival: Arrival, sign: int) -> None:
        owner = arrival.client.number, arrival.request.tenant
        load = self._loads.setdefault(owner, Load())
        load.add(sign, sign * arrival.num_bytes)
        if not load:
            del self._loads[owner]
        self._num_requests += sign
        self._num_bytes += sign * arrival.num_bytes
