"""Decides which processes may connect, before anything is sent to them or read from them.

libzmq asks the gate of a context about every new connection of a guarded socket, on either side (ZAP, RFC 27). Over
`ipc://` it knows the other process's user id from the kernel (SO_PEERCRED), with CURVE the key that the other side
has proven to own.

Without a gate, or after its end, a guarded socket connects to no peer.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from pagewire.ipc.host.owned import trusted_users

logger = logging.getLogger("pagewire.peers")

ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks, in every context
CREDENTIALS = re.compile(r":(\d+):\d+:\d+$")  # uid, gid and pid at the end of the address of an ipc peer
LOG_SECONDS = 1.0  # between two log lines about refused peers, who may try again all the time


class Peer(msgspec.Struct, frozen=True):
    """The other side of a new connection, as far as it is known.

    host: its address, for TCP. user: its user id, for ipc. key: its CURVE public key (Z85).
    """

    host: str
    user: int | None = None
    key: bytes | None = None


Admit = Callable[[Peer], str]


class Gate:
    """Answers libzmq's questions about new connections of the guarded sockets of a context.

    admit: returns the name under which a peer is known from then on (see `sockets.receive_from`), or raises
        PermissionError.

    Attributes:
        socket: is readable while a question waits for `answer`. refusal: why the last refused peer was refused.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admit: Admit) -> None:
        self.refusal: PermissionError | None = None
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ENDPOINT)
        self._admit = admit
        self._next_log = 0.0
        self._thread: threading.Thread | None = None
        self._stop_fds: tuple[int, int] | None = None

    def answer(self) -> None:
        """Answer the questions that wait."""
        while self.socket.poll(0):
            version, number, *question = self.socket.recv_multipart()
            try:
                verdict, name = b"200", self._admit(read_peer(*question))
            except Exception as error:  # of any kind: what cannot be decided is refused
                verdict, name = b"400", ""
                self.refusal = error if isinstance(error, PermissionError) else PermissionError(repr(error))
                if self._thread is not None:  # without one, the caller of `answer` reports it
                    self._log(self.refusal)
            self.socket.send_multipart([version, number, verdict, b"", name.encode(), b""])

    def _log(self, refusal: PermissionError) -> None:
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + LOG_SECONDS
            logger.warning("refused a connection: %s", refusal)

    def start(self) -> None:
        """Answer on a thread of its own until `stop`."""
        self._stop_fds = os.pipe()
        self._thread = threading.Thread(
            target=self._serve, args=[self._stop_fds[0]], name="gate", daemon=True
        )
        self._thread.start()

    def _serve(self, stop_fd: int) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(stop_fd, zmq.POLLIN)
        try:
            while all(source != stop_fd for source, _ in poller.poll()):
                self.answer()
        finally:
            self.socket.close()

    def stop(self) -> None:
        """End the thread and close the socket: from now on no peer can connect. May be called twice."""
        if self._thread is not None and self._stop_fds is not None:
            os.write(self._stop_fds[1], b"x")
            self._thread.join()
            for descriptor in self._stop_fds:
                os.close(descriptor)
            self._thread = self._stop_fds = None
        self.socket.close()


def read_peer(domain: bytes, address: bytes, identity: bytes, mechanism: bytes, *credentials: bytes) -> Peer:
    """The peer that a question of libzmq is about.

    Raises:
        PermissionError: this build of libzmq does not say which user an ipc peer is.
    """
    host, user = address.decode(errors="replace"), None
    if domain == b"ipc":
        if (found := CREDENTIALS.search(host)) is None:
            raise PermissionError(
                "this build of ZeroMQ does not report the user of an ipc peer: use another pyzmq"
            )
        user = int(found[1])
    key: Any = z85.encode(credentials[0]) if mechanism == b"CURVE" else None
    return Peer(host, user, key)


def owner_of(address: str, peer_uid: int | None) -> Admit:
    """Admits the listener at an ipc address if it runs as this user or root, or, if given, as user `peer_uid`."""
    users = trusted_users() if peer_uid is None else frozenset({peer_uid})

    def admit(peer: Peer) -> str:
        if peer.user in users:
            return f"uid:{peer.user}"
        raise PermissionError(
            f"the process that listens at {address} runs as user {peer.user}, not as "
            f"{' or '.join(f'user {user}' for user in sorted(users, reverse=True))}; "
            f"if it may be trusted, name its user with --peer-uid {peer.user} (in Python: peer_uid={peer.user})"
        )

    return admit
