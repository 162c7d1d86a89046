"""The connections that a server has open: how many, from where, and which of them have no request.

A new connection takes the place of the oldest one without a complete request if there is no other place, so clients
that connect and send nothing, or send very slowly, keep no others out.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from typing import Protocol

from pagewire.frontend.server.http.limits import ConnectionLimits, host_network


class ConnectionHolder(Protocol):
    """The holder of one connection: a TLS handshake, and then the protocol of HTTP."""

    def evict(self) -> None:
        """Close the connection at once."""

    def expire(self, now: float) -> None:
        """The connection's deadline has passed. now: time of the event loop."""


def refuse_connection(connection: socket.socket, answer: bytes) -> None:
    """Send an answer as far as that is possible without waiting, and end the connection; the caller closes it."""
    try:
        connection.send(answer, socket.MSG_DONTWAIT)
        connection.shutdown(socket.SHUT_WR)
        # A request that has come already, unread, would make the answer be lost.
        connection.recv(1 << 16, socket.MSG_DONTWAIT)
    except OSError:
        pass


class HttpConnection:
    """One open connection.

    Attributes:
        network: where it comes from (`host_network`); None: from a Unix socket.
        peer: what holds it now. deadline: time of the event loop at which `peer.expire` is called.
    """

    def __init__(self, network: str | None, peer: ConnectionHolder, deadline: float) -> None:
        self.network, self.peer, self.deadline = network, peer, deadline


class Connections:
    """The open connections of one server.

    Attributes:
        refusal: the whole answer to one for which there is no place.
    """

    def __init__(self, limits: ConnectionLimits, refusal: bytes = b"") -> None:
        self._limits, self.refusal = limits, refusal
        self._open: set[HttpConnection] = set()
        self._idle: dict[HttpConnection, None] = {}  # without a complete request, in order: the oldest first
        self._per_network: Counter[str | None] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, host: str | None, peer: ConnectionHolder, deadline: float) -> HttpConnection | None:
        """Return a new connection from a host, which has no request yet; None: all places are taken.

        host: IP address; None: a Unix socket, whose clients have no address and so only the limit of all.
        """
        network = None if host is None else host_network(host)
        per_address = self._limits.most_per_address
        if network is not None and self._per_network[network] >= per_address and not self._evict(network):
            return None
        if len(self._open) >= self._limits.most and not self._evict():
            return None
        connection = HttpConnection(network, peer, deadline)
        self._open.add(connection)
        self._idle[connection] = None
        self._per_network[network] += 1
        return connection

    def _evict(self, network: str | None = None) -> bool:
        """Close the oldest connection that has no request, of one network or of all; False: there is none."""
        candidates = (one for one in self._idle if network is None or one.network == network)
        oldest = next(candidates, None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.peer.evict()
        return True

    def busy(self, connection: HttpConnection) -> None:
        """Note that a complete request has come: only its answer ends the connection."""
        self._idle.pop(connection, None)
        connection.deadline = math.inf

    def idle(self, connection: HttpConnection, deadline: float) -> None:
        """Note that all requests are answered. deadline: for the next one."""
        if connection in self._open:
            self._idle[connection] = None
        connection.deadline = deadline

    def remove(self, connection: HttpConnection) -> None:
        """Forget a connection that is closed. Has no effect a second time."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._per_network[connection.network] -= 1
        if not self._per_network[connection.network]:
            del self._per_network[connection.network]

    def expire(self, now: float) -> None:
        """Notify the connections whose deadline has passed. now: time of the event loop."""
        for connection in [one for one in self._open if one.deadline <= now]:
            connection.peer.expire(now)
