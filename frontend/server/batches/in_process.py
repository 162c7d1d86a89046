"""Requests to an ASGI application in this process, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from pagewire.frontend.server.batches.lines import BatchResponse, Post
from pagewire.frontend.server.http.tenants import ApiTenant


def open_poster(app: ASGIApp, key: str | None = None, tenant: ApiTenant | None = None) -> Post:
    """Return a function that posts JSON to a path of the application.

    key: the API key to send, if any. tenant: whose the requests are, in place of a key.
    """
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if key is not None:
        headers.append((b"authorization", b"Bearer " + key.encode()))

    async def post(path: str, body: bytes) -> BatchResponse:
        return await exchange(app, path, body, headers, {} if tenant is None else {"tenant": tenant})

    return post


async def exchange(
    app: ASGIApp, path: str, body: bytes, headers: list[tuple[bytes, bytes]], more: Mapping[str, Any]
) -> BatchResponse:
    """Send one request and return the whole response. The application sees cancellation as a client that left.

    more: of the scope.
    """
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
        **more,
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

    handling = asyncio.ensure_future(app(scope, incoming.get, send))
    try:
        await asyncio.shield(handling)
    except asyncio.CancelledError:
        incoming.put_nowait({"type": "http.disconnect"})
        raise
    return BatchResponse(status, request_id.decode("latin-1"), write_as_json(bytes(content)))


def write_as_json(content: bytes) -> msgspec.Raw:
    """Return a body as JSON on one line; a body that is not JSON becomes an error object with it as message."""
    try:
        return msgspec.Raw(msgspec.json.format(content, indent=-1))
    except msgspec.DecodeError:
        return msgspec.Raw(msgspec.json.encode({"error": {"message": content.decode(errors="replace")}}))
