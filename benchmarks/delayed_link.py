"""Two network namespaces, and a link between them whose packets arrive late: two machines on one, for benchmarks.

    a device of the one namespace --> this process holds each packet for the latency --> a device of the other

It needs root and `/dev/net/tun`. The kernel's netem would do the same, but not every kernel has it.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import ioctl
from pathlib import Path

DEVICE = "late0"
CLONE_NEWNET = 0x40000000  # sched.h
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
MAX_PACKET = 65536
STOP_SECONDS = 0.1  # between two looks whether the link is to end


@contextmanager
def delayed_link(names: tuple[str, str], addresses: tuple[str, str], seconds: float) -> Iterator[None]:
    """Make two network namespaces with an address each, and connect them, for the length of a block.

    seconds: what a packet takes, in either direction; a round trip takes twice that, and some ten microseconds.

    Raises:
        OSError, subprocess.CalledProcessError: this process may not, or a name is in use.
    """
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        relay = Relay(names, seconds)
        stack.callback(relay.stop)
        relay.start()
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
        yield


class Relay:
    """A thread that passes packets on between a device in either namespace, each after a time."""

    def __init__(self, names: tuple[str, str], seconds: float) -> None:
        self._names, self._seconds = names, seconds
        self._open, self._ended = threading.Event(), threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="delayed link", daemon=True)

    def start(self) -> None:
        """Make the devices; raises OSError."""
        self._thread.start()
        self._open.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the thread, and with it the devices."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        # A thread may enter another network namespace alone.
        devices: list[int] = []
        try:
            for name in self._names:
                devices.append(open_device(name))
        except OSError as error:
            self._error = error
        self._open.set()
        if self._error is None:
            self._pass_on(devices[0], devices[1])
        for device in devices:
            os.close(device)

    def _pass_on(self, first: int, second: int) -> None:
        """Until `stop`. Every packet takes the same time, so the first one that came is the first one due."""
        other = {first: second, second: first}
        held: deque[tuple[float, int, bytes]] = deque()  # when it is due, where to, the packet
        while not self._ended.is_set():
            wait = max(0.0, held[0][0] - time.monotonic()) if held else STOP_SECONDS
            readable, _, _ = select.select([first, second], [], [], wait)
            for device in readable:
                with suppress(BlockingIOError):
                    while True:
                        packet = os.read(device, MAX_PACKET)
                        held.append((time.monotonic() + self._seconds, other[device], packet))
            while held and held[0][0] <= time.monotonic():
                _, device, packet = held.popleft()
                with suppress(
                    OSError
                ):  # the device is down, or its queue full: a packet is lost, as on any link
                    os.write(device, packet)


def open_device(namespace: str) -> int:
    """Enter a network namespace with this thread, and make a device there; returns its descriptor, not blocking.

    Raises:
        OSError: this process may not.
    """
    with Path("/run/netns", namespace).open() as entered:
        if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def ip(*arguments: str) -> None:
    """Run `ip` with these arguments."""
    subprocess.run(["ip", *arguments], check=True)
