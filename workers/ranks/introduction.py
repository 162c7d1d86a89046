"""How a worker introduces itself to its core: which machine it is on, and where other ranks reach it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from pagewire.ipc.host.ports import LAST_PORT, first_port
from pagewire.ipc.wire.messages import PROTOCOL
from pagewire.ipc.wire.worker_messages import WorkerHello

BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


def machine_name() -> str:
    """A name that is equal in processes that can share memory: of one boot, network namespace and user."""
    try:
        return f"{BOOT.read_text().strip()}/{NETWORK.stat().st_ino}/{os.geteuid()}"
    except OSError:
        return f"{socket.gethostname()}/{os.geteuid()}"


def introduce(core_address: str) -> tuple[WorkerHello, socket.socket | None]:
    """The first message to a core, and the socket at which this worker listens for other ranks.

    It listens only if the core is reached over TCP: others may then be on other machines. `PAGEWIRE_HOST_IP` and
    `PAGEWIRE_PORT` say where, if they are set; a port that is in use is passed over.

    Raises:
        OSError: it cannot listen there. ValueError: `PAGEWIRE_PORT` is no port.
    """
    hello = WorkerHello(PROTOCOL, os.getpid(), machine_name())
    if not core_address.startswith("tcp://"):
        return hello, None
    url = urlsplit(core_address)
    host = own_address(url.hostname or "", url.port or 0)
    listener = listen(host)
    hello.host, hello.port = host, listener.getsockname()[1]
    return hello, listener


def own_address(host: str, port: int) -> str:
    """The address of this machine, as another machine at `host` reaches it: `PAGEWIRE_HOST_IP` where it is set.

    Raises:
        OSError: no network leads there.
    """
    if address := os.environ.get("PAGEWIRE_HOST_IP"):
        return address
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(target)
        return str(probe.getsockname()[0])


def listen(host: str) -> socket.socket:
    """A socket bound to an address, at `PAGEWIRE_PORT` or the next free port after it; without it, at any port.

    Raises:
        OSError: it cannot be bound. ValueError: the variable is no port.
    """
    first = first_port()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, LAST_PORT + 1):
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if first == 0 or port == LAST_PORT:
                raise OSError(f"cannot listen at {host}: {error}; PAGEWIRE_HOST_IP says where") from error
    raise OSError(f"no port from {first} on is free")
