"""The connections to all cores from which KV blocks are fetched (`--kv-peers`), in a thread.

find(), fetch() --> [thread "kv-peers"] --PeerLink--> another core
take()          <-- [thread "kv-peers"] <------------ another core
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from pagewire.engine_core.tiers.peer_link import PING_SECONDS, PeerEvent, PeerLink
from pagewire.ipc.errors import error_text
from pagewire.ipc.host.gate import Gate, owner_of
from pagewire.ipc.wire.sockets import CurveKeys, check_address
from pagewire.ipc.wire.tier_messages import PART_BYTES

logger = logging.getLogger("pagewire.core")

SPARE_BYTES = 1 << 20  # of a message, beside blocks: headers of entries


class PeerLinks:
    """The thread and its sockets. All methods are for the thread of the core's loop; none waits for a core.

    addresses: of the cores. curve: the certificate of this core, which the others have, too, as those of a router
        do. None: they are on this machine.

    Attributes:
        reachable: the indices of the cores that may be asked.

    Raises:
        ValueError: an address beyond loopback, without a certificate.
    """

    def __init__(self, addresses: Sequence[str], curve: CurveKeys | None = None) -> None:
        for address in addresses:
            try:
                check_address(address, encrypted=curve is not None)
            except ValueError as error:
                raise ValueError(f"kv_peers: {error}") from None
        self.addresses = tuple(addresses)
        self.reachable: frozenset[int] = frozenset()
        self._curve = None if curve is None else CurveKeys(curve.public, curve.secret, curve.public)
        self._links: list[PeerLink] = []
        self._lock = threading.Lock()
        self._orders: list[Callable[[], None]] = []
        self._events: list[PeerEvent] = []
        self._wake: Callable[[], None] = lambda: None
        self._alarm = -1
        self._ends = False
        self._thread: threading.Thread | None = None

    def start(self, wake: Callable[[], None], max_block_bytes: int) -> None:
        """Connect. wake: called by the thread when there is an event. max_block_bytes: of the largest block."""
        self._wake = wake
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        max_bytes = max(PART_BYTES, max_block_bytes) + SPARE_BYTES
        self._thread = threading.Thread(target=self._run, args=[max_bytes], name="kv-peers", daemon=True)
        self._thread.start()

    def find(self, peer: int, number: int, first: int, identity: bytes, names: bytes) -> None:
        """Ask a core which blocks it has; see `PeerLink.find`."""
        self._order(lambda: self._links[peer].find(number, first, identity, names, time.monotonic()))

    def fetch(self, peer: int, number: int, identity: bytes, names: bytes) -> None:
        """Fetch blocks of a core; see `PeerLink.fetch`."""
        self._order(lambda: self._links[peer].fetch(number, identity, names, time.monotonic()))

    def take(self) -> list[PeerEvent]:
        """What has ended since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End the thread, and close the sockets. May be called twice."""
        if self._thread is not None:
            self._ends = True
            os.eventfd_write(self._alarm, 1)
            self._thread.join()
            os.close(self._alarm)
            self._thread = None

    def _order(self, order: Callable[[], None]) -> None:
        with self._lock:
            self._orders.append(order)
        os.eventfd_write(self._alarm, 1)

    # ------------------------------------------------------------ the thread

    def _run(self, max_bytes: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate = Gate(context, owner_of("an address of kv_peers", None))
        gate.start()
        self._links = [
            PeerLink(context, index, address, self._curve, max_bytes, self._ended)
            for index, address in enumerate(self.addresses)
        ]
        try:
            while not self._ends:
                self._turn()
        finally:
            self.reachable = frozenset()
            for link in self._links:
                link.close()
            gate.stop()
            context.destroy(linger=0)

    def _turn(self) -> None:
        """Handle orders, messages and what is due, then wait for more."""
        with self._lock:
            orders, self._orders = self._orders, []
        for order in orders:
            order()
        now = time.monotonic()
        poller = zmq.Poller()
        poller.register(self._alarm, zmq.POLLIN)
        for link in self._links:
            try:
                link.check(now)
                link.receive(now)
            except zmq.ZMQError as error:  # such as too many open files
                link.leave(now, error_text(error))
            for socket in (link.socket, link.monitor):
                if socket is not None:
                    poller.register(socket, zmq.POLLIN)
        reachable = frozenset(index for index, link in enumerate(self._links) if link.attached)
        if reachable != self.reachable:
            self.reachable = reachable
            self._wake()
        if self._alarm in dict(poller.poll(math.ceil(PING_SECONDS * 1000))):
            os.eventfd_read(self._alarm)

    def _ended(self, event: PeerEvent) -> None:
        with self._lock:
            self._events.append(event)
        self._wake()
