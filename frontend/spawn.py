"""Starts an engine core as a child process, which ends no later than this process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import uuid
import weakref
from pathlib import Path

import msgspec

from pagewire.ipc.lifeline import Child
from pagewire.ipc.options import EngineArgs
from pagewire.ipc.sockets import private_address

STOP_SECONDS = 10.0
KILL_SECONDS = 1.0


class SpawnedCore:
    """A core that belongs to this process. It ends with `shutdown`, when this object is collected, at exit,
    and (by its lifeline) however else this process ends.

    Attributes:
        child: its process. address: where it listens.
    """

    def __init__(self, child: Child, address: str) -> None:
        self.child, self.address = child, address
        self._stop = weakref.finalize(self, stop, child, address, os.getpid())

    @property
    def pid(self) -> int:
        """Process id."""
        return self.child.pid

    def shutdown(self, timeout: float = STOP_SECONDS) -> None:
        """Ask it to stop, wait up to `timeout` seconds, then kill it. May be called twice."""
        if self._stop.detach() is not None:
            stop(self.child, self.address, os.getpid(), timeout)


def spawn_core(args: EngineArgs, address: str | None = None) -> SpawnedCore:
    """Start a core with `args` that listens at `address` (default: a private one); returns at once.

    Its log goes to stderr of this process; a frontend that connects also gets the cause of a failed start.

    Raises:
        ValueError, PermissionError, OSError: a bad address, or no process could be started.
    """
    address = address or private_address(f"core-{os.getpid()}-{uuid.uuid4().hex[:12]}")
    command = [sys.executable, "-m", "pagewire.engine_core.daemon", "--listen", address, "--options-stdin"]
    return SpawnedCore(Child(command, stdin=msgspec.json.encode(dataclasses.asdict(args))), address)


def stop(child: Child, address: str, owner: int, timeout: float = STOP_SECONDS) -> None:
    """End a core and remove what it may have left of its socket.

    owner: the process whose child it is; in a fork of that process nothing happens.
    """
    if os.getpid() != owner:
        return
    child.process.terminate()
    try:
        child.process.wait(timeout)  # the lifeline is cut only then: that would end it on the spot
    except subprocess.TimeoutExpired:
        pass
    child.stop(KILL_SECONDS)
    if address.startswith("ipc://"):
        path = Path(address.removeprefix("ipc://"))
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".lock").unlink(missing_ok=True)
