"""Accepting of connections. They count from the moment they are accepted: before TLS, before any byte of HTTP."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from pagewire.frontend.server.http.connections import Connections, HttpConnection, refuse_connection

logger = logging.getLogger("pagewire.server")

ACCEPTS_AT_ONCE = (
    32  # per turn of the event loop; fewer than the reserved descriptors, see `Connections.admit`
)
PAUSE_SECONDS = 1.0  # after an error that accepting again would only repeat
NOTHING_TO_ACCEPT = (BlockingIOError, InterruptedError, ConnectionAbortedError)


class Handshake:
    """The peer of a connection that is not HTTP yet: a task, which ends early if the connection has to go.

    accepted: the socket, until the event loop has it. is_handed_over: the loop has begun to take it, and closes it.
    refusal: for it, if it has to go; empty: none.
    """

    def __init__(self, accepted: socket.socket, refusal: bytes) -> None:
        self.accepted: socket.socket | None = accepted
        self.is_handed_over = False
        self._refusal = refusal
        self.task: asyncio.Task[None] | None = None

    def evict(self) -> None:
        """End it, also while the event loop takes it over: with an answer, where one can be sent."""
        if self.accepted is not None:
            if self._refusal:
                refuse_connection(self.accepted, self._refusal)
            if not self.is_handed_over:
                self.accepted.close()
        if self.task is not None:
            self.task.cancel()

    def expire(self, now: float) -> None:
        """End it."""
        self.evict()


class HttpListener:
    """Accepts connections on one socket; `close` and `wait_closed` are those of `asyncio.Server`.

    new_protocol: makes the protocol of a connection. context: for TLS. handshake_seconds: time for its handshake.
    """

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        new_protocol: Callable[[HttpConnection], asyncio.Protocol],
        *,
        context: ssl.SSLContext | None,
        handshake_seconds: float,
        backlog: int,
    ) -> None:
        self._listening, self._connections, self._new_protocol = listening, connections, new_protocol
        self._context, self._handshake_seconds = context, handshake_seconds
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[Handshake] = set()
        self._resumption: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        listening.listen(backlog)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Accept nothing more. Connections stay open; handshakes do not."""
        self._pause()
        for handshake in list(self._handshakes):
            handshake.evict()

    async def wait_closed(self) -> None:
        """Wait until the handshakes have ended."""
        if tasks := [handshake.task for handshake in self._handshakes if handshake.task is not None]:
            await asyncio.wait(tasks)

    def _pause(self) -> None:
        if self._resumption is not None:
            self._resumption.cancel()
            self._resumption = None
        elif self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening.fileno())

    def _resume(self) -> None:
        self._resumption = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        """Accept what waits."""
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted, address = self._listening.accept()
            except NOTHING_TO_ACCEPT:
                return
            except (
                OSError
            ) as error:  # no descriptor or memory is left: connections wait in the kernel's queue
                logger.error("cannot accept a connection: %s", errno.errorcode.get(error.errno or 0, error))
                self._pause()
                self._resumption = self._loop.call_later(PAUSE_SECONDS, self._resume)
                return
            host = address[0] if isinstance(address, tuple) else None
            handshake = Handshake(accepted, b"" if self._context else self._connections.refusal)
            deadline = self._loop.time() + self._handshake_seconds
            connection = self._connections.admit(host, handshake, deadline)
            if connection is None:
                self._refuse(accepted)
                continue
            handshake.task = self._loop.create_task(self._connect(handshake, connection))
            self._handshakes.add(handshake)
            handshake.task.add_done_callback(partial(self._end, handshake))

    async def _connect(self, handshake: Handshake, connection: HttpConnection) -> None:
        """Make a connection one of HTTP. If that fails, the event loop closes the socket."""
        accepted = handshake.accepted
        assert accepted is not None
        handshake.is_handed_over = True
        protocol = self._new_protocol(connection)
        try:
            accepted.setblocking(False)
            seconds = None if self._context is None else self._handshake_seconds
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=seconds,
            )
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError) as error:  # OSError: also of TLS
            self._connections.remove(connection)
            # Cancelled late, uvloop closes a connection that the protocol already has, without notice to it.
            protocol.connection_lost(ConnectionAbortedError())
            logger.debug("a connection ended in its handshake: %r", error)
        finally:
            handshake.accepted = None

    def _end(self, handshake: Handshake, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection could not be taken over", exc_info=error)

    def _refuse(self, accepted: socket.socket) -> None:
        """Answer 503 as far as that is possible without waiting, and close."""
        with accepted:
            if self._context is None:
                refuse_connection(accepted, self._connections.refusal)
