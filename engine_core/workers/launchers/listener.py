"""The socket that workers connect to."""

from __future__ import annotations

import os
from dataclasses import dataclass

import zmq

from pagewire.ipc.address_lock import AddressLock
from pagewire.ipc.sockets import bind_router, private_address


@dataclass(frozen=True)
class Listener:
    """A bound ROUTER socket, and the address under which workers reach it."""

    socket: zmq.Socket[bytes]
    address: str
    lock: AddressLock
    """Tells others that an ipc address is in use."""

    @classmethod
    def local(cls, context: zmq.Context[zmq.Socket[bytes]]) -> Listener:
        """A socket for this user's processes on this machine.

        Raises:
            OSError: it cannot be bound.
        """
        address = private_address(f"worker-{os.getpid()}-{os.urandom(4).hex()}")
        lock = AddressLock(address)
        return cls(bind_router(context, address), address, lock)

    def close(self) -> None:
        """Close the socket, and give its address free."""
        self.socket.close()
        self.lock.release()
