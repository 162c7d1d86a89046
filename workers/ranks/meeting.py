"""How the ranks of one machine meet: rank 0 listens under the name of the rendezvous, and hands out a descriptor.

The name is that of an abstract UNIX socket, for which no file stands: nothing is left behind, however they end.
It is random, and only processes of the same user are admitted. A worker has no time limit here: see `interface`.
"""

from __future__ import annotations

import os
import socket
import struct
import time

RETRY_SECONDS = 0.005  # until rank 0 listens
CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: pid, uid, gid
MAX_TEXT = 256


def host(name: str, num_others: int, text: str, descriptor: int | None = None) -> None:
    """Hand a text, and perhaps a descriptor, to all other ranks.

    Raises:
        OSError: the name is in use.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(num_others)
        while num_others:
            other, _ = listener.accept()
            with other:
                if is_own_user(other):
                    descriptors = [] if descriptor is None else [descriptor]
                    socket.send_fds(other, [text.encode()], descriptors)
                    num_others -= 1


def visit(name: str) -> tuple[str, int | None]:
    """The text and the descriptor that rank 0 hands out under this name; waits until it does.

    Raises:
        ConnectionError: another user listens there, or rank 0 has ended.
    """
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect("\0" + name)
            except ConnectionRefusedError:
                time.sleep(RETRY_SECONDS)
                continue
            if not is_own_user(connection):
                raise ConnectionError("a process of another user has the name of this group's rendezvous")
            text, descriptors, _, _ = socket.recv_fds(connection, MAX_TEXT, 1)
            if not text:
                raise ConnectionError("rank 0 has ended before the group was complete")
            return text.decode(), descriptors[0] if descriptors else None


def is_own_user(connection: socket.socket) -> bool:
    """True if the process at the other end runs as this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(credentials)[1] == os.geteuid())
