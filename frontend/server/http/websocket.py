"""A WebSocket, which carries one request after the other: each message is the body of one.

HttpProtocol --upgrade--> WebSocket --scope "websocket"--> the application, which accepts or refuses it, and has
its messages in `scope["extensions"][MESSAGES]`

A message comes in parts, as the body of a request does, so the same limits of size, time and memory hold while it
arrives. Only text is taken. Nothing is compressed: a message is as large as the bytes that were sent for it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import generate_accept_token

from pagewire.frontend.server.http.api_shapes import OPENAI
from pagewire.frontend.server.http.connections import Connections, HttpConnection
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.limits import (
    KEEP_ALIVE_SECONDS,
    MAX_SMALL_PARTS,
    MAX_UNREAD_BYTES,
    PART_BYTES,
    REQUEST_PARTS,
    SOCKET_IDLE_SECONDS,
    SOCKET_PING_SECONDS,
    SOCKET_READ_AHEAD_BYTES,
)

logger = logging.getLogger("pagewire.server")

MESSAGES = "pagewire.messages"
"""Name of the extension in the scope of a WebSocket that gives its messages: `Messages`."""
KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")  # 16 bytes in base64
VERSION = b"13"  # of RFC 6455, the only one


class Messages(Protocol):
    """The messages of a WebSocket that was accepted, as the application uses them: one after the other."""

    async def begin(self) -> bool:
        """Wait for the next message; False: no further one is taken."""

    async def receive(self) -> Message:
        """As `receive` of ASGI: the next part of the message as that of a body, and then that the client left."""

    async def skip(self) -> None:
        """Drop what `receive` has not given of the message; close if that is long."""

    async def send(self, text: bytes) -> None:
        """Send a message once the client has read most of the earlier ones; if it has left, do nothing."""

    def close(self, code: int, reason: str) -> None:
        """End the connection: no further message is taken or sent."""


def handshake_fault(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return what is wrong with the headers of a request that opens a WebSocket; None: nothing."""
    given = dict(headers)
    if given.get(b"sec-websocket-version") != VERSION:
        return "a WebSocket needs the header Sec-WebSocket-Version: 13"
    if KEY.fullmatch(given.get(b"sec-websocket-key", b"")) is None:
        return "a WebSocket needs the header Sec-WebSocket-Key, with 16 bytes in base64"
    return None


class WebSocket(asyncio.Protocol):
    """One connection from its upgrade on.

    It counts as one without a request, whose place another connection may take, until a message is complete, and
    again once that is answered.

    app, scope: of ASGI; the scope is that of the request that opens it, whose headers have no fault.
    connection: its entry in `table`. state: the server's. stall_seconds: for how long a client may
    read nothing when the connection is closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        connection: HttpConnection,
        table: Connections,
        state: ServerState,
        stall_seconds: float,
    ) -> None:
        self._app = app
        self._scope = {**scope, "type": "websocket", "subprotocols": []}
        del self._scope["method"]
        self._scope["extensions"] = {"websocket.http.response": {}, MESSAGES: self}
        self._connection, self._table, self._state = connection, table, state
        self._stall_seconds = stall_seconds
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self._frames: Connection | None = None  # None: not accepted
        self._refused = False  # instead of accepted
        self._announced = False  # the application knows of the connection
        # Those that came and were not taken; True: the last of a message.
        self._parts: deque[tuple[bytes, bool]] = deque()
        self._num_waiting = 0  # their bytes
        self._reading = True
        self._unsent = -1  # bytes that waited to be sent when the deadline last passed while closing
        self._num_discarded = 0  # bytes that came after the end
        self._small_parts = 0.0  # see `HttpProtocol`
        self._idle_until = 0.0
        self._unfinished = False  # `receive` has not given all of the message
        self._left = False  # the client, or the connection was closed
        self._stops = False  # the server: no further message is taken
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    def open(self, transport: asyncio.Transport) -> None:
        """Take over the connection, and run the application."""
        self.transport = transport
        self._state.connections.add(self)  # type: ignore[arg-type]  # which needs `shutdown`
        self._connection.peer = self
        self._connection.deadline = self._loop.time() + self._stall_seconds
        transport.set_protocol(self)
        task = self._loop.create_task(self._run())
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._events, self._answer)
        except Exception:
            logger.exception("a WebSocket failed")
            self.close(CloseReason.INTERNAL_ERROR, "the server failed")
        finally:
            if self._frames is None and not self._refused:
                self._refuse(APIError(500, "the server failed"))
            self.close(CloseReason.GOING_AWAY if self._stops else CloseReason.NORMAL_CLOSURE, "")
            if self._stops:
                self.transport.close()  # at once: the server stops

    # ------------------------------------------------------------ ASGI, until it is accepted

    async def _events(self) -> Message:
        """`receive` of ASGI: messages do not come by it."""
        if not self._announced:
            self._announced = True
            return {"type": "websocket.connect"}
        while not self._left:
            await next_change(self._changed)
        return {"type": "websocket.disconnect", "code": int(CloseReason.NO_STATUS_RCVD)}

    async def _answer(self, message: Message) -> None:
        """`send` of ASGI: accept the WebSocket, or answer the request that opens it as any other one."""
        kind = message["type"]
        if kind == "websocket.accept" and self._frames is None and not self._refused:
            key = dict(self._scope["headers"])[b"sec-websocket-key"]
            accepted = (b"upgrade", b"websocket"), (b"sec-websocket-accept", generate_accept_token(key))
            self.transport.write(
                head_of(101, [*accepted, (b"connection", b"upgrade"), *message.get("headers", ())])
            )
            self._frames = Connection(ConnectionType.SERVER)
        elif kind == "websocket.close" and self._frames is None:  # the router's, of unknown paths
            self._refuse(APIError(404, "there is no WebSocket at this path"))
        elif kind == "websocket.http.response.start":
            self._refused = True
            self.transport.write(head_of(message["status"], [*message["headers"], (b"connection", b"close")]))
        elif kind == "websocket.http.response.body":
            self.transport.write(message.get("body", b""))
            if not message.get("more_body", False):
                self._end_refused()
        else:
            raise RuntimeError(f"{kind} cannot be sent here")

    def _refuse(self, error: APIError) -> None:
        self._refused = True
        body = OPENAI.encode(error)
        length = (b"content-length", b"%d" % len(body))
        headers = [(b"content-type", b"application/json"), length, (b"connection", b"close")]
        self.transport.write(head_of(error.status, headers) + body)
        self._end_refused()

    def _end_refused(self) -> None:
        self.transport.close()
        self._connection.deadline = self._loop.time() + KEEP_ALIVE_SECONDS
        self._leave()

    # ------------------------------------------------------------ messages, for the application

    async def begin(self) -> bool:
        """Wait for the next message; False: no further one is taken."""
        now = self._loop.time()
        self._table.idle(self._connection, now + SOCKET_PING_SECONDS)
        self._idle_until = now + SOCKET_IDLE_SECONDS
        while not (self._parts or self._left or self._stops):
            await next_change(self._changed)
        self._unfinished = not (self._left or self._stops)
        return self._unfinished

    async def receive(self) -> Message:
        """As `receive` of ASGI: the next part of the message as that of a body, and then that the client left."""
        while not self._left and not (self._unfinished and self._parts):
            await next_change(self._changed)
        if self._left:
            return {"type": "http.disconnect"}
        part, is_last = self._parts.popleft()
        self._num_waiting -= len(part)
        self._read()
        if is_last:
            self._unfinished, self._idle_until = False, 0.0
            self._table.busy(self._connection)
            self._connection.deadline = self._loop.time() + SOCKET_PING_SECONDS
        return {"type": "http.request", "body": part, "more_body": not is_last}

    async def skip(self) -> None:
        """Drop the rest of the message; close if it is long."""
        num_bytes = 0
        while self._unfinished and not self._left:
            num_bytes += len((await self.receive()).get("body", b""))
            if num_bytes > MAX_UNREAD_BYTES:
                self.close(CloseReason.MESSAGE_TOO_BIG, "the rest of the message is not read")

    async def send(self, text: bytes) -> None:
        """Send a message once the client has read most of the earlier ones; if it has left, do nothing."""
        await self._writable.wait()
        if self._is_open():
            self._write(TextMessage(text.decode()))

    def close(self, code: int, reason: str) -> None:
        """End the connection: no further message is taken or sent. The client has some time to end it, too."""
        if self._is_open():
            self._write(CloseConnection(code, reason))
            self._connection.deadline = self._loop.time() + KEEP_ALIVE_SECONDS
            self._leave()
            self._read()

    # ------------------------------------------------------------ frames

    def data_received(self, data: bytes) -> None:
        """Read frames; before the connection is accepted there must be none."""
        if self._frames is None or self._frames.state is ConnectionState.CLOSED:
            self.transport.abort()
            return
        if not self._is_open():
            self._num_discarded += len(data)
            if self._num_discarded > MAX_UNREAD_BYTES:
                self.transport.abort()
                return
        self._frames.receive_data(data)
        for event in self._frames.events():
            if self._left and not isinstance(event, CloseConnection):
                continue  # what comes after the end
            self._take(event)

    def _take(self, event: Event) -> None:
        assert self._frames is not None
        if isinstance(event, CloseConnection):
            if self._frames.state is ConnectionState.OPEN:  # the parser's, of bytes that are no frames
                self.close(event.code, event.reason or "")
                return
            if self._frames.state is ConnectionState.REMOTE_CLOSING:
                self._write(event.response())
            self._leave()
            self.transport.close()
            self._connection.deadline = self._loop.time() + KEEP_ALIVE_SECONDS
        elif isinstance(event, TextMessage):
            part = event.data.encode()
            self._count(len(part))
            self._parts.append((part, event.message_finished))
            self._num_waiting += len(part)
            if event.message_finished:
                self._small_parts = max(0.0, self._small_parts - REQUEST_PARTS)
            self._read()
            self._changed.set()
        elif isinstance(event, BytesMessage):
            self.close(CloseReason.UNSUPPORTED_DATA, "messages are text")
        elif isinstance(event, (Ping, Pong)):
            self._count(0)
            if isinstance(event, Ping) and self._is_open() and self._writable.is_set():
                self._write(event.response())

    def _count(self, num_bytes: int) -> None:
        """Count a frame, or what has come of it: each costs the same work, however small it is."""
        self._small_parts = max(0.0, self._small_parts + 1 - num_bytes / PART_BYTES)
        if self._small_parts > MAX_SMALL_PARTS:
            self.close(CloseReason.POLICY_VIOLATION, f"too many frames of less than {PART_BYTES} bytes")

    def _is_open(self) -> bool:
        """Return True if frames may be sent: neither side has closed, and the connection is there."""
        is_open = self._frames is not None and self._frames.state is ConnectionState.OPEN
        return is_open and not self.transport.is_closing()

    def _write(self, event: Event) -> None:
        assert self._frames is not None
        self.transport.write(self._frames.send(event))

    def _read(self) -> None:
        """Read on, or wait until more of what came is taken; after the end, read on: the client's is to be seen."""
        wanted = self._left or self._num_waiting <= SOCKET_READ_AHEAD_BYTES
        if wanted != self._reading and not self.transport.is_closing():
            self._reading = wanted
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()

    def _leave(self) -> None:
        self._left = True
        self._changed.set()
        self._writable.set()

    # ------------------------------------------------------------ asyncio, the server, and the table of connections

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and notify the application."""
        self._state.connections.discard(self)
        self._table.remove(self._connection)
        self._leave()

    def pause_writing(self) -> None:
        """The client reads slowly: messages wait."""
        if not self._left:
            self._writable.clear()

    def resume_writing(self) -> None:
        """The client has read most of what was sent."""
        self._writable.set()

    def shutdown(self) -> None:
        """Take no further message: the server ends once what has begun is answered."""
        self._stops = True
        self._changed.set()

    def evict(self) -> None:
        """Close at once, to make place for another connection."""
        self.close(CloseReason.TRY_AGAIN_LATER, "the server needs the place")
        self.transport.abort()

    def expire(self, now: float) -> None:
        """Send a ping, so that nothing on the way takes the connection for dead, or end it.

        A client need not answer: one that runs its tools reads nothing for minutes. The kernel closes a connection
        whose other side does not acknowledge (`TCP_USER_TIMEOUT`).
        """
        if not self._is_open():
            unsent = self.transport.get_write_buffer_size()
            if unsent == self._unsent or not unsent:
                self.transport.abort()
            self._unsent = unsent
            self._connection.deadline = now + self._stall_seconds
        elif self._idle_until and now >= self._idle_until:
            self.close(CloseReason.GOING_AWAY, f"no message for {SOCKET_IDLE_SECONDS:.0f} s")
        else:
            if self._writable.is_set():
                self._write(Ping())
            self._connection.deadline = now + SOCKET_PING_SECONDS


async def next_change(changed: asyncio.Event) -> None:
    """Wait until an event is set again."""
    changed.clear()
    await changed.wait()


def head_of(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a response."""
    return STATUS_LINE[status] + b"".join(name + b": " + value + b"\r\n" for name, value in headers) + b"\r\n"
