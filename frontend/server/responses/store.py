"""The store of responses: in memory, limited in bytes; the least recently used are dropped first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.responses.protocol import Response
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
        task: generates the response in the background; None: not a background response.
        events: its encoded events, by sequence number, for a streamed background response; else None.
    """

    def __init__(
        self, response: Response, items: list[JSON], events: list[bytes] | None = None, owner: str = ""
    ) -> None:
        self.id, self.events, self.owner = response.id, events, owner
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
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> bool:
        """Store a response, or update its size. Return False if there is no room.

        The least recently used responses are dropped to make room, except those that are still generated.
        """
        name = stored.id
        self.forget(name)
        encoded = stored.encoded()
        size = stored.size(encoded)
        if not self._make_room(size):
            return False
        self._stored[name], self._sizes[name] = stored, size
        for item in item_ids(stored):
            self._places.setdefault(item, []).append(name)
        self.num_bytes += size
        stored.pack(encoded)
        return True

    def grow(self, stored: StoredResponse, num_bytes: int) -> bool:
        """Count the bytes by which a stored response has grown. Return False if there is no room for them.

        For one that is still generated: others are dropped as by `put`, which counts exactly once it has ended.
        """
        name = stored.id
        if name not in self._sizes or not self._make_room(num_bytes):
            return False
        self._sizes[name] += num_bytes
        self.num_bytes += num_bytes
        return True

    def _make_room(self, size: int) -> bool:
        """Drop the least recently used responses until there is room for `size` bytes; False: there is none."""
        idle = (name for name, entry in list(self._stored.items()) if not entry.busy)
        while self.num_bytes + size > self.limit:
            oldest = next(idle, None)
            if oldest is None:
                return False
            self.forget(oldest)
        return True

    def get(self, name: str, owner: str = "") -> StoredResponse:
        """Return the owner's response with an id, and mark it as used.

        Raises:
            APIError: it is not stored, or is another's.
        """
        if not self._has(name, owner):
            raise APIError(404, f"response {quoted(name)} is not stored (any more)", code="not_found")
        self._stored.move_to_end(name)
        return self._stored[name]

    def item(self, name: str, owner: str = "") -> JSON | None:
        """Return the owner's input or output item with an id; None if it is not stored."""
        place = next(
            (place for place in reversed(self._places.get(name, ())) if self._has(place, owner)), None
        )
        if place is None:
            return None
        stored = self.get(place, owner)
        return next(item for item in all_items(stored) if item["id"] == name)

    def conversation(self, name: str | None, owner: str = "") -> list[JSON]:
        """Return all items of the conversation that ends with this response, including its output.

        Raises:
            APIError: a response of the conversation is not stored, is another's, or has failed or not ended.
        """
        turns = reversed(list(self._turns(name, owner)))
        return [item for stored in turns for item in all_items(stored)]

    def _has(self, name: str, owner: str) -> bool:
        return name in self._stored and self._stored[name].owner == owner

    def _turns(self, name: str | None, owner: str) -> Iterator[StoredResponse]:
        """Yield this response and its predecessors, the latest first."""
        while name is not None:
            if not self._has(name, owner):
                message = f"previous_response_id: response {quoted(name)} is not stored (any more)"
                raise APIError(404, message, param="previous_response_id", code="previous_response_not_found")
            stored = self.get(name, owner)
            response = stored.response
            if response.status not in USABLE:
                message = f"previous_response_id: response {name} is {response.status}"
                raise APIError(400, message, param="previous_response_id")
            yield stored
            name = response.previous_response_id

    def forget(self, name: str) -> None:
        """Remove a response, if it is stored."""
        stored = self._stored.pop(name, None)
        if stored is not None:
            self.num_bytes -= self._sizes.pop(name)
            for item in item_ids(stored):
                others = [other for other in self._places.pop(item, ()) if other != name]
                if others:
                    self._places[item] = others


def item_ids(stored: StoredResponse) -> list[str]:
    """Return the ids of a response's input and output items."""
    response, items = stored.contents()
    return [*(item["id"] for item in items), *(item.id for item in response.output)]


def all_items(stored: StoredResponse) -> list[JSON]:
    """Return a response's input and output items as plain dicts."""
    response, items = stored.contents()
    output: list[JSON] = msgspec.to_builtins(response.output)
    return items + output
