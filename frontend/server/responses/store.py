"""The store of responses: in memory, limited in bytes; the least recently used are dropped first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.responses.protocol import Response

JSON = dict[str, Any]
RUNNING = ("queued", "in_progress")
USABLE = ("completed", "incomplete")


class Kept:
    """A response and its input.

    Attributes:
        response: the response, which grows while it is generated. items: its own input items.
        task: generates the response in the background; None: not a background response.
        told: its encoded events, by sequence number, for a streamed background response; else None.
    """

    def __init__(self, response: Response, items: list[JSON], told: list[bytes] | None = None) -> None:
        self.response, self.items, self.told = response, items, told
        self.task: asyncio.Task[None] | None = None
        self._added = asyncio.Event()

    @property
    def busy(self) -> bool:
        """True while the response is generated in the background."""
        return self.task is not None and not self.task.done()

    def size(self) -> int:
        """Return the approximate size in bytes, measured as JSON."""
        told = sum(map(len, self.told or ()))
        return len(msgspec.json.encode(self.response)) + len(msgspec.json.encode(self.items)) + told

    def tell(self, events: list[bytes]) -> None:
        """Add events and wake up the followers."""
        if self.told is not None:
            self.told += events
        added, self._added = self._added, asyncio.Event()
        added.set()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after sequence number `after`, until the response ends."""
        assert self.told is not None
        place = after + 1
        while True:
            if events := self.told[place:]:
                place += len(events)
                yield b"".join(events)
            elif self.response.status not in RUNNING:
                return
            else:
                await self._added.wait()


class ResponseStore:
    """The stored responses. limit: total size in bytes; 0: store none."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, kept: Kept) -> bool:
        """Store a response, or update its size. Return False if there is no room.

        The least recently used responses are dropped to make room, except those that are still generated.
        """
        name = kept.response.id
        self.forget(name)
        size = kept.size()
        idle = (other for other, entry in list(self._kept.items()) if not entry.busy)
        while self.num_bytes + size > self.limit:
            oldest = next(idle, None)
            if oldest is None:
                return False
            self.forget(oldest)
        self._kept[name], self._sizes[name] = kept, size
        self.num_bytes += size
        return True

    def get(self, name: str) -> Kept:
        """Return the response with an id, and mark it as used.

        Raises:
            APIError: it is not stored.
        """
        if name not in self._kept:
            raise APIError(404, f"response {name!r:.100} is not stored (any more)", code="not_found")
        self._kept.move_to_end(name)
        return self._kept[name]

    def conversation(self, name: str | None) -> list[JSON]:
        """Return all items of the conversation that ends with this response, including its output.

        Raises:
            APIError: a response of the conversation is not stored, or has failed or not ended.
        """
        return [item for kept in reversed(list(self._line(name))) for item in (*kept.items, *output_of(kept))]

    def _line(self, name: str | None) -> Iterator[Kept]:
        """Yield this response and its predecessors, the latest first."""
        while name is not None:
            if name not in self._kept:
                message = f"previous_response_id: response {name!r:.100} is not stored (any more)"
                raise APIError(404, message, param="previous_response_id", code="previous_response_not_found")
            kept = self.get(name)
            if kept.response.status not in USABLE:
                message = f"previous_response_id: response {name} is {kept.response.status}"
                raise APIError(400, message, param="previous_response_id")
            yield kept
            name = kept.response.previous_response_id

    def forget(self, name: str) -> None:
        """Remove a response, if it is stored."""
        if self._kept.pop(name, None) is not None:
            self.num_bytes -= self._sizes.pop(name)


def output_of(kept: Kept) -> list[JSON]:
    """Return the output's items as plain dicts."""
    items: list[JSON] = msgspec.to_builtins(kept.response.output)
    return items
