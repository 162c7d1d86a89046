"""Requests to an ASGI application in this process, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from pagewire.cli.batch.lines import BatchResponse, Post


def poster(app: ASGIApp, key: str | None = None) -> Post:
    """Return a function that posts JSON to a path of the application. key: the API key to send, if any."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if key is not None:
        headers.append((b"authorization", b"Bearer " + key.encode()))

    async def post(path: str, body: bytes) -> BatchResponse:
        return await exchange(app, path, body, headers)

    return post


async def exchange(app: ASGIApp, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> BatchResponse:
    """Send one request and return the whole response. The application sees cancellation as a client that left."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": ("localhost", None),
        "state": {},
    }
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
    status, request_id, content = 500, b"", bytearray()

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = {name.lower(): value for name, value in message["headers"]}.get(b"x-request-id", b"")
        else:
            content.extend(message.get("body", b""))

    await app(scope, incoming.get, send)
    return BatchResponse(status, request_id.decode("latin-1"), as_json(bytes(content)))


def as_json(content: bytes) -> msgspec.Raw:
    """Return a body as JSON on one line; a body that is not JSON becomes an error object with it as message."""
    try:
        return msgspec.Raw(msgspec.json.format(content, indent=-1))
    except msgspec.DecodeError:
        return msgspec.Raw(msgspec.json.encode({"error": {"message": content.decode(errors="replace")}}))
