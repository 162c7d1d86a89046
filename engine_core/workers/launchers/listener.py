"""The socket that workers connect to."""

from __future__ import annotations

import os
from dataclasses import dataclass

import zmq

from pagewire.ipc.host.address_lock import AddressLock
from pagewire.ipc.host.gate import Admit, Peer
from pagewire.ipc.host.ports import LAST_PORT, first_port
from pagewire.ipc.join.group_key import GroupKey
from pagewire.ipc.wire.sockets import bind_router, private_address


@dataclass(frozen=True)
class WorkerListener:
    """A bound ROUTER socket, and the address under which workers reach it."""

    socket: zmq.Socket[bytes]
    address: str
    lock: AddressLock
    """Shows other processes that an ipc address is in use."""

    @classmethod
    def local(cls, context: zmq.Context[zmq.Socket[bytes]], address: str | None = None) -> WorkerListener:
        """A socket for this user's processes on this machine.

        address: where it listens; None: at an address that is made for it.

        Raises:
            OSError: it cannot be bound.
        """
        address = address or private_address(f"worker-{os.getpid()}-{os.urandom(4).hex()}")
        lock = AddressLock(address)
        return cls(bind_router(context, address), address, lock)

    @classmethod
    def tcp(cls, context: zmq.Context[zmq.Socket[bytes]], host: str, key: GroupKey) -> WorkerListener:
        """A socket for workers that have the group's key; the context has a gate that admits them.

        Its port is the first free one from `PAGEWIRE_PORT` on, or any if that is not set.

        Raises:
            OSError: it cannot be bound. ValueError: `PAGEWIRE_PORT` is no port.
        """
        name = f"[{host}]" if ":" in host else host
        first = first_port()
        for port in range(first, LAST_PORT + 1):
            try:
                socket = bind_router(context, f"tcp://{name}:{port}", key.core)
            except OSError:
                if first == 0 or port == LAST_PORT:
                    raise
            else:
                address = socket.last_endpoint.decode()  # type: ignore[union-attr]
                return cls(socket, address, AddressLock(address))
        raise ValueError(f"PAGEWIRE_PORT must be a port, got {first}")

    def close(self) -> None:
        """Close the socket, and give its address free."""
        self.socket.close()
        self.lock.release()


def admit_workers(key: GroupKey) -> Admit:
    """Admits the peers that have the group's key to the sockets of a context."""
    public = key.worker.public

    def admit(peer: Peer) -> str:
        if peer.key == public:
            return "worker"
        raise PermissionError(f"a worker from {peer.host} has another key than this group's")

    return admit
