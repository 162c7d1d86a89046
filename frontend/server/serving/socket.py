"""Requests over a WebSocket: each message is the body of a POST to its path, and the events of the answer return.

The request goes through all of the application, with the headers of the one that opened the WebSocket: its key, its
limits, its errors and its log line are those of any other request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send
from wsproto.frame_protocol import CloseReason

from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.api_shapes import SOCKET, SocketError
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.websocket import MESSAGES, Messages

# Headers that are those of the connection, or of a body that the message is not.
DROPPED = frozenset(
    {
        b"accept-encoding",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"transfer-encoding",
        b"upgrade",
    }
)
HANDSHAKE = b"sec-websocket-"  # begins the names of the others


class SocketSession:
    """An open WebSocket, as its requests know it (`scope["socket"]`): it may keep something for later ones."""

    def __init__(self) -> None:
        self._acts: list[Callable[[], None]] = []

    def at_end(self, act: Callable[[], None]) -> None:
        """Call `act` when the WebSocket has ended."""
        self._acts.append(act)

    def end(self) -> None:
        """Call what was left for the end."""
        acts, self._acts = self._acts, []
        for act in acts:
            act()


class SocketRequests:
    """An ASGI application that takes requests over WebSockets."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept a WebSocket, and answer one message after the other until it ends."""
        scope.get("handlers", []).append(scope["path"])  # for `TrafficCount`
        messages: Messages = scope["extensions"][MESSAGES]
        await receive()  # it is announced
        await send({"type": "websocket.accept"})
        session = SocketSession()
        try:
            while await messages.begin():
                answer = MessageAnswer(messages)
                await scope["app"](request_scope(scope, session), messages.receive, answer.send)
                if answer.closes:
                    messages.close(CloseReason.POLICY_VIOLATION, "the rest of the message is not read")
                await messages.skip()
        finally:
            session.end()


def request_scope(scope: Scope, session: SocketSession) -> dict[str, Any]:
    """Return the scope of a request that comes as a message of a WebSocket with this scope."""
    kept = ("asgi", "http_version", "server", "client", "path", "raw_path", "query_string", "state")
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in DROPPED and not name.startswith(HANDSHAKE)
    ]
    return {
        **{name: scope[name] for name in kept},
        "type": "http",
        "method": "POST",
        "scheme": "https" if scope["scheme"] == "wss" else "http",
        "root_path": "",
        "headers": [*headers, (b"content-type", b"application/json")],
        "socket": session,
    }


class MessageAnswer:
    """Sends the answer to one message: each event of a stream is a message, and so is an error.

    Attributes:
        closes: the rest of the message is not read, so that no other one can follow.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self.closes = False
        self._status, self._streams = 0, False
        self._body = b""

    async def send(self, message: Message) -> None:
        """As `send` of ASGI."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = Headers(raw=list(message.get("headers", ())))
            self._streams = headers.get("content-type", "").startswith("text/event-stream")
            self.closes = headers.get("connection") == "close"
            return
        body = message.get("body", b"")
        if self._streams:
            for data in sse.data_of(body):
                await self._messages.send(data)
            return
        self._body += body
        if self._body and not message.get("more_body", False):
            await self._messages.send(error_message(self._status, self._body))


def error_message(status: int, body: bytes) -> bytes:
    """Return the message for an answer that is no stream: its body, if that is an error, or one with its status.

    A middleware of the user may answer with anything.
    """
    try:
        msgspec.json.decode(body, type=SocketError)
    except msgspec.MsgspecError:
        return SOCKET.encode(APIError(status, f"the request was answered with status {status}"))
    return body
