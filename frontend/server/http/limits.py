"""Limits of HTTP connections that hold before any request is looked at.

Heads are limited in bytes and in time, connections in number. The number follows from how many files the process
may have open: some are reserved, since the engine's sockets, log files and certificates need descriptors, too.
"""

from __future__ import annotations

import ipaddress
import logging
from functools import lru_cache
from typing import NamedTuple

from pagewire.ipc.host.descriptors import descriptor_limit, num_open_descriptors

logger = logging.getLogger("pagewire.server")

MAX_TARGET_BYTES = 8 << 10  # path and query of a request
MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 << 10  # all headers of a request; also trailers and the framing between parts of a body
MAX_SMALL_PARTS = 4096  # parts of bodies, in excess of one for each `PART_BYTES`, that a connection may send
PART_BYTES = 64
REQUEST_PARTS = 16  # parts that each request may have, whatever their size
MAX_UNREAD_BYTES = 1 << 20  # of a body that come after the answer: more of them close the connection
MAX_PIPELINED = 16  # requests on one connection that wait for the answers of earlier ones
KEEP_ALIVE_SECONDS = 5.0  # a connection without a request is closed after this time
BODY_GRACE_SECONDS = 1.0  # after `body_seconds`: endpoints that read a body answer 408 themselves before that
SOCKET_IDLE_SECONDS = 3600.0  # a WebSocket without a message is closed after this time
SOCKET_PING_SECONDS = 20.0  # between two pings to the client of a WebSocket
SOCKET_READ_AHEAD_BYTES = 64 << 10  # of messages that come before earlier ones are answered; no more are read

RESERVED_DESCRIPTORS = 64  # beside what is open when the server starts: jobs, downloads, log files
SPARE_DESCRIPTORS = 8  # the same, where few are allowed
FEW_CONNECTIONS = 64  # a server that can have no more says so when it starts
MOST_CONNECTIONS = 16384  # unless `--max-connections` says otherwise


class ConnectionLimits(NamedTuple):
    """How many connections a server has at most.

    most: in all. most_per_address: from one address.
    """

    most: int
    most_per_address: int


def connection_limits(most: int | None, most_per_address: int | None) -> ConnectionLimits:
    """Return the limits for given options; None: from the limit of open files, and half of all for one address.

    Raises:
        ValueError: there cannot be that many open files.
    """
    descriptors, num_open = descriptor_limit(), num_open_descriptors()
    room = max(descriptors - num_open - RESERVED_DESCRIPTORS, descriptors // 2)
    room = min(room, descriptors - num_open - SPARE_DESCRIPTORS)
    limit = f"this process may have {descriptors} open files (ulimit -n), and has {num_open}"
    if room < 1:
        needed = num_open + SPARE_DESCRIPTORS + FEW_CONNECTIONS
        raise ValueError(
            f"there is no room for a connection: {limit}; {needed} give {FEW_CONNECTIONS} connections"
        )
    if most is not None and most > room:
        raise ValueError(f"max_connections must be at most {room}, got {most}: {limit}")
    if room < FEW_CONNECTIONS and most is None:
        logger.warning("at most %d connections at a time: %s; raise it to 1024 or more", room, limit)
    most = min(room, MOST_CONNECTIONS) if most is None else most
    return ConnectionLimits(most, max(1, most // 2) if most_per_address is None else most_per_address)


@lru_cache(4096)
def host_network(host: str) -> str:
    """Return what counts as one address: an IPv4 address, or the /64 network that a host has with IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
