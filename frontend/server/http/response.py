"""The response to a request for generation: JSON, or events as they come."""

from __future__ import annotations

from starlette.types import Send

from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError

Header = tuple[bytes, bytes]

JSON_HEADERS: list[Header] = [(b"content-type", b"application/json")]


class HttpResponse:
    """The response: JSON, or events. Nothing is sent before there is something to say, so that an error that
    comes first still gets its status.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.streaming = self.complete = False

    async def stream(self, events: bytes) -> None:
        """Send events, encoded, in one write."""
        if not self.streaming:
            self.streaming = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*sse.HEADERS]})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """No more events."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_json(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a whole answer."""
        self.complete = True
        more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*JSON_HEADERS, length, *more],
            }
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: APIError) -> None:
        """Tell an error: by its status or, within a stream, by an event. After a complete answer it is too late."""
        if self.complete:
            return
        if self.streaming:
            await self.stream(b"data: " + error.encode() + b"\n\n" + sse.DONE)
            await self.end()
        else:
            await self.send_json(error.status, error.encode(), error.headers)
