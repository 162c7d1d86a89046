"""Responses that are kept: in memory, those used last, up to a number of bytes."""

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
    """A response, and what it answers.

    response: it may still grow. items: of its own input. task: makes it, in the background; None: it is made.
    told: its events, encoded, by sequence number, if it was asked for as a stream in the background.
    """

    def __init__(self, response: Response, items: list[JSON], told: list[bytes] | None = None) -> None:
        self.response, self.items, self.told = response, items, told
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def busy(self) -> bool:
        """True while it is made."""
        return self.task is not None and not self.task.done()

    def size(self) -> int:
        """Bytes, about: of its JSON."""
        told = sum(map(len, self.told or ()))
        return len(msgspec.json.encode(self.response)) + len(msgspec.json.encode(self.items)) + told

    def tell(self, events: list[bytes]) -> None:
        """More events; those who follow wake up."""
        if self.told is not None:
            self.told += events
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield its events from the one after number `after`, until its end."""
        assert self.told is not None
        place = after + 1
        while True:
            if events := self.told[place:]:
                place += len(events)
                yield b"".join(events)
            elif self.response.status not in RUNNING:
                return
            else:
                await self._news.wait()


class ResponseStore:
    """The responses that are kept. limit: bytes; 0: none is."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, kept: Kept) -> bool:
        """Keep a response, or take note of how it has grown. Others, those used longest ago, go for it; none that
        is being made. False if there is no room.
        """
        name = kept.response.id
        self.forget(name)
        size = kept.size()
        idle = (other for other, one in list(self._kept.items()) if not one.busy)
        while self.num_bytes + size > self.limit:
            oldest = next(idle, None)
            if oldest is None:
                return False
            self.forget(oldest)
        self._kept[name], self._sizes[name] = kept, size
        self.num_bytes += size
        return True

    def get(self, name: str) -> Kept:
        """The response of that id.

        Raises:
            APIError: it is not kept here.
        """
        if name not in self._kept:
            raise APIError(404, f"there is no response {name!r:.100} here (any more)", code="not_found")
        self._kept.move_to_end(name)
        return self._kept[name]

    def conversation(self, name: str | None) -> list[JSON]:
        """All items from the conversation's beginning to the end of this response's output.

        Raises:
            APIError: a response of it is not kept here, or has not come to a good end.
        """
        return [item for kept in reversed(list(self._line(name))) for item in (*kept.items, *output_of(kept))]

    def _line(self, name: str | None) -> Iterator[Kept]:
        """This response and those before it, the last first."""
        while name is not None:
            if name not in self._kept:
                message = f"previous_response_id: there is no response {name!r:.100} here (any more)"
                raise APIError(404, message, param="previous_response_id", code="previous_response_not_found")
            kept = self.get(name)
            if kept.response.status not in USABLE:
                message = f"previous_response_id: response {name} is {kept.response.status}"
                raise APIError(400, message, param="previous_response_id")
            yield kept
            name = kept.response.previous_response_id

    def forget(self, name: str) -> None:
        """Keep it no longer."""
        if self._kept.pop(name, None) is not None:
            self.num_bytes -= self._sizes.pop(name)


def output_of(kept: Kept) -> list[JSON]:
    """The output's items as plain data."""
    items: list[JSON] = msgspec.to_builtins(kept.response.output)
    return items
