"""uvicorn's protocol of HTTP/1 with limits that it lacks: size and time of a request, and pipelined requests.

A request that opens a WebSocket is the last one of its connection, which is a `WebSocket` from then on.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pagewire.frontend.server.http.api_shapes import OPENAI
from pagewire.frontend.server.http.connections import Connections, HttpConnection, refuse_connection
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.limits import (
    BODY_GRACE_SECONDS,
    KEEP_ALIVE_SECONDS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_SMALL_PARTS,
    MAX_TARGET_BYTES,
    MAX_UNREAD_BYTES,
    PART_BYTES,
    REQUEST_PARTS,
)
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.websocket import WebSocket, handshake_fault

VERSIONS = ("1.0", "1.1")


class HttpProtocol(HttpToolsProtocol):
    """One connection: reads requests within limits, runs the application, and closes when a deadline has passed.

    connection: its entry among the server's `connections`.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        connection: HttpConnection,
        connections: Connections,
        options: ServerOptions,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._connection, self._table, self._options = connection, connections, options
        self._overhead = (
            0  # bytes received since the last byte of a body, or since the end of the last request
        )
        # Each part costs the same work, however small: bytes of bodies earn a connection its share of them.
        self._small_parts = 0.0
        self._unread = 0  # bytes of a body that came after the answer
        self._receiving = False  # a request has begun to arrive and is not complete
        self._in_head = True  # what comes next belongs to a head
        self._unanswered = 0  # requests whose head has come and whose answer is not complete
        self._refusal: APIError | None = None
        self._running: RequestResponseCycle | None = (
            None  # uvicorn's own attribute is that of the last request
        )
        self._unsent = -1  # bytes that waited to be sent when the deadline last passed while closing
        self._upgrades = False  # the request that came last opens a WebSocket

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take over the connection; its deadline goes on."""
        super().connection_made(transport)
        self._connection.peer = self

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and notify the request that runs: uvicorn would notify the one that came last."""
        self._table.remove(self._connection)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come. Headers, trailers and the framing of a body may take `MAX_HEAD_BYTES` in a row."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._close_with(too_large_head(f"the headers are over {MAX_HEAD_BYTES} bytes"))

    # ------------------------------------------------------------ the parser

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._receiving = self._in_head = True
        self._unread = 0
        self._small_parts = max(0.0, self._small_parts - REQUEST_PARTS)
        if not self._unanswered:
            self._connection.deadline = self.loop.time() + self._options.head_seconds

    def on_url(self, url: bytes) -> None:
        """A part of the request's target has come."""
        if len(self.url) + len(url) > MAX_TARGET_BYTES:
            self._fail(APIError(414, f"the path and query are over {MAX_TARGET_BYTES} bytes"))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header or a trailer has come."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._fail(too_large_head(f"there are over {MAX_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        """The head is complete: start the application, or queue the request behind earlier ones."""
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            self._fail(
                APIError(505, f"HTTP/{version} is not supported, but HTTP/{' and HTTP/'.join(VERSIONS)}")
            )
        if self._unanswered > MAX_PIPELINED:
            self._fail(APIError(429, f"over {MAX_PIPELINED} requests wait on this connection"))
        if self._overhead > MAX_HEAD_BYTES and request_head_size(self.headers) > MAX_HEAD_BYTES:
            self._fail(too_large_head(f"the headers are over {MAX_HEAD_BYTES} bytes"))
        self._upgrades = self._opens_websocket()
        super().on_headers_complete()
        self.headers = []  # trailers go here and are not used: the checks of headers are over
        self._overhead, self._in_head = 0, False
        if self._upgrades:
            return
        self._unanswered += 1
        if self._unanswered == 1:
            self._running = self.cycle
            self._connection.deadline = self._body_deadline()

    def on_body(self, body: bytes) -> None:
        """A part of the body has come: all that the connection has sent of it, or a chunk."""
        self._overhead = 0
        self._small_parts = max(0.0, self._small_parts + 1 - len(body) / PART_BYTES)
        if self._small_parts > MAX_SMALL_PARTS:
            message = f"the body comes in too many parts of less than {PART_BYTES} bytes: send larger chunks"
            self._fail(APIError(400, message, code="chunks_too_small"))
        if not self._unanswered:
            self._unread += len(body)
            if self._unread > MAX_UNREAD_BYTES:
                self._fail(APIError(413, "the rest of the body is not read", code="request_too_large"))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of a request has come."""
        self._overhead, self._receiving, self._in_head = 0, False, True
        if self._unanswered:
            self._table.busy(self._connection)
        else:  # it was answered before
            self._table.idle(self._connection, self.loop.time() + KEEP_ALIVE_SECONDS)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request is answered."""
        self._unanswered -= 1
        if not self._unanswered:
            deadline = self._body_deadline() if self._receiving else self.loop.time() + KEEP_ALIVE_SECONDS
            self._table.idle(self._connection, deadline)
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()

    def _body_deadline(self) -> float:
        return self.loop.time() + self._options.body_seconds + BODY_GRACE_SECONDS

    # ------------------------------------------------------------ upgrade

    def _opens_websocket(self) -> bool:
        """Return True if the request whose head is complete is the only one here, and opens a WebSocket."""
        if self._unanswered or self.parser.get_method() != b"GET" or not self.parser.should_upgrade():
            return False
        return self._get_upgrade() == b"websocket"

    def _should_upgrade(self) -> bool:
        """Return what was found when the head was complete: uvicorn asks after that, too."""
        return self._upgrades

    def handle_websocket_upgrade(self) -> None:
        """Give the connection to a WebSocket, unless the request for it is malformed."""
        headers = self.scope["headers"]
        try:
            target = httptools.parse_url(self.url)
            path = unquote(target.path.decode("ascii"))
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            self._close_with(APIError(400, "the path is not valid"))
            return
        if (fault := handshake_fault(headers)) is not None:
            self._close_with(APIError(400, fault))
            return
        scope = {
            **self.scope,
            "scheme": "wss" if self.scheme == "https" else "ws",
            "path": path,
            "raw_path": target.path,
            "query_string": target.query or b"",
        }
        self.connections.discard(self)
        opened = WebSocket(
            self.app, scope, self._connection, self._table, self.server_state, self._options.stall_seconds
        )
        opened.open(self.transport)

    # ------------------------------------------------------------ refusals

    def _fail(self, refusal: APIError) -> None:
        """Refuse the request that is being parsed.

        Raises:
            APIError: always; it ends the parser, and `send_400_response` then answers.
        """
        self._refusal = refusal
        raise refusal

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser has refused, and close."""
        self._close_with(self._refusal or APIError(400, msg))

    def _close_with(self, refusal: APIError) -> None:
        """Answer with an error, unless there is an answer or one is being sent, and close."""
        self._refusal = refusal
        if self._may_answer():
            body = OPENAI.encode(refusal)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[refusal.status] + head % len(body) + body)
        self.transport.close()
        self._connection.deadline = self.loop.time() + KEEP_ALIVE_SECONDS

    def _may_answer(self) -> bool:
        """Return True if an error may answer the request that is being received; nothing else answers it then."""
        if not self._unanswered:
            return self._in_head
        if (
            self._unanswered > 1
            or not self._receiving
            or self._running is None
            or self._running.response_started
        ):
            return False
        self._running.disconnected = True
        self._running.message_event.set()
        return True

    # ------------------------------------------------------------ the peer of a connection

    def evict(self) -> None:
        """Close at once, to make place for another; one whose first request may be on its way gets 503."""
        waits = self.cycle is None or self._receiving
        if self._table.refusal and self.scheme == "http" and waits and self._may_answer():
            own = socket.socket(fileno=self.transport.get_extra_info("socket").fileno())
            try:
                refuse_connection(own, self._table.refusal)
            finally:
                own.detach()  # it is the transport's
        self.transport.abort()

    def expire(self, now: float) -> None:
        """Close the connection after its deadline; one that is closing but sends nothing more is cut."""
        if self.transport.is_closing():
            unsent = self.transport.get_write_buffer_size()
            if unsent == self._unsent:
                self.transport.abort()
            self._unsent = unsent
            self._connection.deadline = now + self._options.stall_seconds
        elif self._receiving:
            self._close_with(APIError(408, "the request did not arrive in time", code="request_too_slow"))
        else:
            self.transport.close()
            self._connection.deadline = now + self._options.stall_seconds


def request_head_size(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the number of bytes of some headers."""
    return sum(len(name) + len(value) for name, value in headers)


def too_large_head(message: str) -> APIError:
    """Return the error for headers that are too many or too long."""
    return APIError(431, message, code="headers_too_large")
