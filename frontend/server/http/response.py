"""The response to a generation request: JSON, or a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from starlette.types import Send

from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.api_shapes import ApiShape
from pagewire.frontend.server.http.errors import APIError

Header = tuple[bytes, bytes]

JSON_HEADERS: list[Header] = [(b"content-type", b"application/json")]
TEXT_HEADERS: list[Header] = [(b"content-type", b"text/plain; charset=utf-8")]
# A client that reads an answer in parts more slowly is cut: others may wait for the memory.
READ_BYTES_PER_SECOND = 256 << 10
READ_GRACE_SECONDS = 60.0  # beside that, for a pause or a slow beginning


class HttpResponse:
    """A response of JSON or events. The status is sent with the first data, so that an earlier error keeps its own.

    shape: how errors and streams are written.

    Attributes:
        streaming: the stream of events has begun. complete: all else has been sent, or can only be cut.
    """

    def __init__(self, send: Send, shape: ApiShape) -> None:
        self._send, self._shape = send, shape
        self.streaming = self.complete = False

    async def begin_stream(self, headers: dict[str, str]) -> None:
        """Send the status of a stream of events, and its headers, with those given in addition."""
        self.streaming = True
        media = (b"content-type", self._shape.media.encode() + b"; charset=utf-8")
        await self._start(200, [media, *sse.HEADERS, *encode_headers(headers)])

    async def stream(self, events: bytes) -> None:
        """Send encoded events, or a part of JSON, in one write. The response has begun."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """End the stream."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_json(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a complete JSON response."""
        await self._send_whole(status, body, [*JSON_HEADERS, *encode_headers(headers or {})])

    async def send_text(self, text: str, headers: dict[str, str]) -> None:
        """Send a complete response of plain text."""
        await self._send_whole(200, text.encode(), [*TEXT_HEADERS, *encode_headers(headers)])

    async def _send_whole(self, status: int, body: bytes, headers: list[Header]) -> None:
        self.complete = True
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def send_parts(self, parts: Iterator[bytes], headers: dict[str, str]) -> None:
        """Send a JSON response in parts; each is made when the client has read most of the earlier ones.

        A failure cuts the response: the server closes the connection before its end.

        Raises:
            APIError: the client reads too slowly.
        """
        self.complete = True
        await self._start(200, [*JSON_HEADERS, *encode_headers(headers)])
        deadline = time.monotonic() + READ_GRACE_SECONDS
        for part in parts:
            try:
                await asyncio.wait_for(self.stream(part), deadline - time.monotonic())
            except asyncio.TimeoutError:
                message = f"the client reads less than {READ_BYTES_PER_SECOND} bytes of the answer per second"
                raise APIError(408, message, code="client_too_slow") from None
            deadline += len(part) / READ_BYTES_PER_SECOND
            await asyncio.sleep(0)  # the server may have been able to take the part at once
        await self.end()

    async def _start(self, status: int, headers: list[Header]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def fail(self, error: APIError) -> None:
        """Send an error, or an error event if the stream has begun. Does nothing after a complete response."""
        if self.complete:
            return
        if self.streaming:
            await self.stream(self._shape.last_words(error))
            await self.end()
        else:
            await self.send_json(self._shape.status(error), self._shape.encode(error), error.headers)


def encode_headers(headers: dict[str, str]) -> list[Header]:
    """Headers as ASGI takes them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
