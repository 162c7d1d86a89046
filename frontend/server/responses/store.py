"""The store of responses: in memory, limited in bytes; the least recently used are dropped first.

They are dropped of the tenant that has most, so that many responses of one do not push out those of others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.responses.protocol import Response
from pagewire.frontend.server.serving.socket import SocketSession
from pagewire.ipc.quoting import quoted

JSON = dict[str, Any]
RUNNING = ("queued", "in_progress")
USABLE = ("completed", "incomplete")
DECODER = msgspec.json.Decoder(tuple[Response, list[JSON]])
FOLLOWED_AT_ONCE = 256  # events in one write: a follower that reads slowly holds no copy of all of them


class StoredResponse:
    """A response and its input: objects while it grows, and JSON, which is smaller, once it has ended.

    Attributes:
        id: that of the response. owner: name of the tenant that made it; for all others it does not exist.
        socket: the WebSocket whose requests alone may continue it; None: all of its owner may.
        task: generates the response in the background; None: not a background response.
        events: its encoded events, by sequence number, for a streamed background response; else None.
    """

    def __init__(
        self,
        response: Response,
        items: list[JSON],
        events: list[bytes] | None = None,
        owner: str = "",
        socket: SocketSession | None = None,
    ) -> None:
        self.id, self.events, self.owner, self.socket = response.id, events, owner, socket
        self.task: asyncio.Task[None] | None = None
        self._growing: tuple[Response, list[JSON]] | None = (response, items)
        self._packed = b""
        self._added = asyncio.Event()

    @property
    def response(self) -> Response:
        """The response, which grows while it is generated; of a packed one, a copy."""
        return self.contents()[0]

    @property
    def items(self) -> list[JSON]:
        """Its own input items; of a packed one, a copy."""
        return self.contents()[1]

    def encoded(self) -> bytes:
        """Response and items as JSON."""
        return self._packed if self._growing is None else msgspec.json.encode(self._growing)

    def pack(self, encoded: bytes) -> None:
        """Keep no more than `encoded()` of what has ended: it does not change any more."""
        if self._growing is not None and self.response.status not in RUNNING:
            self._packed, self._growing = encoded, None

    def contents(self) -> tuple[Response, list[JSON]]:
        """`response` and `items`."""
        return DECODER.decode(self._packed) if self._growing is None else self._growing

    @property
    def num_packed(self) -> int:
        """The bytes that `contents` decodes: none while the response grows."""
        return len(self._packed)

    @property
    def busy(self) -> bool:
        """True while the response is generated in the background."""
        return self.task is not None and not self.task.done()

    def size(self, encoded: bytes | None = None) -> int:
        """Return the size in bytes, measured as JSON. encoded: `encoded()`, if it is at hand."""
        return len(encoded or self.encoded()) + sum(map(len, self.events or ()))

    def add_events(self, events: list[bytes]) -> None:
        """Add events and wake up the followers."""
        if self.events is not None:
            self.events += events
        added, self._added = self._added, asyncio.Event()
        added.set()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after sequence number `after` (-1: all), until the response ends.

        Raises:
            ValueError: `after` is less than -1.
        """
        if after < -1:  # a negative index would find the same events again and again
            raise ValueError(f"after must be at least -1, got {after}")
        assert self.events is not None
        all_events, next_event = self.events, after + 1
        while True:
            if events := all_events[next_event : next_event + FOLLOWED_AT_ONCE]:
                next_event += len(events)
                yield b"".join(events)
            elif self.response.status not in RUNNING:
                return
            else:
                await self._added.wait()


class ResponseStore:
    """The stored responses. limit: total size in bytes; 0: store none."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._places: dict[str, list[str]] = {}  # ids of the responses with an item, by the item's id
        self._by_owner: Counter[str] = Counter()  # bytes
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> bool:
        """Store a response, or update its size. Return False if there is no room.

        The least recently used responses of the tenant that has most, with this one, are dropped to make room,
        except those that are still generated.
        """
        name = stored.id
        self.forget(name)
        encoded = stored.encoded()
        size = stored.size(encoded)
        if not self._make_room(size, stored.owner):
            return False
        self._stored[name], self._sizes[name] = stored, size
        for item in item_ids(stored):
            self._places.setdefault(item, []).append(name)
        self._count(stored.owner, size)
        stored.pack(encoded)
        return True

    def grow(self, stored: StoredResponse, num_bytes: int) -> bool:
        """Count the bytes by which a stored response has grown. Return False if there is no room for them.

        For one that is still generated: others are dropped as by `put`, which counts exactly once it has ended.
        """
        name = stored.id
        if name not in self._sizes or not self._make_room(num_bytes, stored.owner):
            return False
        self._sizes[name] += num_bytes
        self._count(stored.owner, num_bytes)
        return True

    def _make_room(self, size: int, owner: str) -> bool:
        """Drop responses until there is room for `size` bytes of an owner; False: there is none."""
        if self.num_bytes + size <= self.limit:
            return True
        idle: dict[str, deque[str]] = {}
        for name, entry in self._stored.items():
            if not entry.busy:
                idle.setdefault(entry.owner, deque()).append(name)
        while self.num_bytes + size > self.limit:
            if not idle:
                return False
            largest = max(idle, key=lambda each: self._by_owner[each] + size * (each == owner))
            self.forget(idle[largest].popleft())
            if not idle[largest]:
                del idle[largest]
        return True

    def _count(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._by_owner[owner] += num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def get(self, name: str, owner: str = "", socket: SocketSession | None = None) -> StoredResponse:
        """Return the owner's response with an id, and mark it as used. socket: the request's.

        Raises:
            APIError: it is not stored, or is another's.
        """
        if not self._has(name, owner, socket):
            raise APIError(404, f"response {quoted(name)} is not stored (any more)", code="not_found")
        self._stored.move_to_end(name)
        return self._stored[name]

    def place_of(
        self, item: str, owner: str = "", socket: SocketSession | None = None
    ) -> StoredResponse | None:
        """Return the owner's latest response that has an item with this id; None if there is none."""
        places = reversed(self._places.get(item, ()))
        place = next((place for place in places if self._has(place, owner, socket)), None)
        return None if place is None else self.get(place, owner, socket)

    def _has(self, name: str, owner: str, socket: SocketSession | None = None) -> bool:
        stored = self._stored.get(name)
        return stored is not None and stored.owner == owner and stored.socket in (None, socket)

    def forget(self, name: str) -> None:
        """Remove a response, if it is stored."""
        stored = self._stored.pop(name, None)
        if stored is not None:
            self._count(stored.owner, -self._sizes.pop(name))
            for item in item_ids(stored):
                others = [other for other in self._places.pop(item, ()) if other != name]
                if others:
                    self._places[item] = others


class StoredItems:
    """The items of a tenant's stored responses that one request refers to.

    Decoding them holds up the event loop: each response is decoded once, and all of them together have no more
    bytes than a request itself may have.
    """

    def __init__(
        self, store: ResponseStore, owner: str, max_bytes: int, socket: SocketSession | None = None
    ) -> None:
        self._store, self._owner, self._socket = store, owner, socket
        self._left = self._max_bytes = max_bytes
        self._contents: dict[str, tuple[Response, list[JSON]]] = {}
        self._by_id: dict[str, dict[str, JSON]] = {}

    def item(self, name: str) -> JSON | None:
        """Return the input or output item with an id; None if it is not stored.

        Raises:
            APIError: the request refers to too much.
        """
        stored = self._store.place_of(name, self._owner, self._socket)
        if stored is None:
            return None
        if stored.id not in self._by_id:
            self._by_id[stored.id] = {item["id"]: item for item in reversed(self._items(stored))}
        return self._by_id[stored.id].get(name)

    def conversation(self, name: str | None) -> list[JSON]:
        """Return all items of the conversation that ends with this response, including its output.

        Raises:
            APIError: a response of the conversation is not stored, is another's, or has failed or not ended; or the
                request refers to too much.
        """
        turns: list[list[JSON]] = []
        while name is not None:
            try:
                stored = self._store.get(name, self._owner, self._socket)
            except APIError as error:
                message = f"previous_response_id: {error.message}"
                code = "previous_response_not_found"
                raise APIError(404, message, param="previous_response_id", code=code) from None
            response, _ = self._read(stored)
            if response.status not in USABLE:
                message = f"previous_response_id: response {name} is {response.status}"
                raise APIError(400, message, param="previous_response_id")
            turns.append(self._items(stored))
            name = response.previous_response_id
        return [item for turn in reversed(turns) for item in turn]

    def _items(self, stored: StoredResponse) -> list[JSON]:
        """Return a response's input and output items as plain dicts."""
        response, items = self._read(stored)
        output: list[JSON] = msgspec.to_builtins(response.output)
        return items + output

    def _read(self, stored: StoredResponse) -> tuple[Response, list[JSON]]:
        if stored.id not in self._contents:
            self._left -= stored.num_packed
            if self._left < 0:
                message = f"the stored responses that it refers to have over {self._max_bytes} bytes"
                raise APIError(413, message, code="request_too_large")
            self._contents[stored.id] = stored.contents()
        return self._contents[stored.id]


def item_ids(stored: StoredResponse) -> list[str]:
    """Return the ids of a response's input and output items, each once: clients choose those of their input."""
    response, items = stored.contents()
    return list(dict.fromkeys([*(item["id"] for item in items), *(item.id for item in response.output)]))
