"""The response to a generation request: JSON, or a stream of events."""

from __future__ import annotations

from starlette.types import Send

from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError

Header = tuple[bytes, bytes]

JSON_HEADERS: list[Header] = [(b"content-type", b"application/json")]


class HttpResponse:
    """A response of JSON or events. The status is sent with the first data, so that an earlier error keeps its own.

    Attributes:
        streaming: the stream of events has begun. complete: the whole response has been sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.streaming = self.complete = False

    async def begin_stream(self, headers: dict[str, str]) -> None:
        """Send the status of a stream of events, and its headers, with those given in addition."""
        self.streaming = True
        start = {"type": "http.response.start", "status": 200, "headers": [*sse.HEADERS, *encoded(headers)]}
        await self._send(start)

    async def stream(self, events: bytes) -> None:
        """Send encoded events in one write. The stream has begun."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """End the stream."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_json(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a complete JSON response."""
        self.complete = True
        length = (b"content-length", str(len(body)).encode())
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*JSON_HEADERS, length, *encoded(headers or {})],
            }
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: APIError) -> None:
        """Send an error, or an error event if the stream has begun. Does nothing after a complete response."""
        if self.complete:
            return
        if self.streaming:
            await self.stream(b"data: " + error.encode() + b"\n\n" + sse.DONE)
            await self.end()
        else:
            await self.send_json(error.status, error.encode(), error.headers)


def encoded(headers: dict[str, str]) -> list[Header]:
    """Headers as ASGI takes them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
