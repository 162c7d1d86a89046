"""Starts an engine core as a child process, which ends no later than this process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import uuid
import weakref
from importlib.util import find_spec
from pathlib import Path

import msgspec

from pagewire.ipc.host.address_lock import remove_left_overs_of, sweep
from pagewire.ipc.host.lifeline import Child
from pagewire.ipc.host.system import require_linux
from pagewire.ipc.options import ray_cluster
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.sockets import private_address, runtime_dir

STOP_SECONDS = 10.0  # for a core to end after SIGTERM
KILL_SECONDS = 1.0  # and after its lifeline is closed, before it is killed


class SpawnedCore:
    """A core process that belongs to this process. It ends with `shutdown`, when this object is collected, at exit,
    and (by its lifeline) with any other end of this process.

    Attributes:
        child: its process. address: the address at which it listens.
    """

    def __init__(self, child: Child, address: str) -> None:
        self.child, self.address = child, address
        self._stop = weakref.finalize(self, stop_core, child, address, os.getpid())

    @property
    def pid(self) -> int:
        """Process id."""
        return self.child.pid

    def shutdown(self, timeout: float = STOP_SECONDS) -> None:
        """Stop the core with SIGTERM; kill it if it runs after `timeout` seconds. May be called twice."""
        if self._stop.detach() is not None:
            stop_core(self.child, self.address, os.getpid(), timeout)


def spawn_core(args: EngineArgs, address: str | None = None) -> SpawnedCore:
    """Start a core with `args` that listens at `address` (default: a private one), without waiting.

    Its log goes to stderr of this process. If it cannot start, a frontend that connects gets the error.

    Raises:
        ValueError, PermissionError, OSError: a bad address, no process could be started, no engine is installed, or
            this is no Linux.
    """
    from pagewire.ipc.models.registrations import (
        all_registrations,  # a frontend that attaches registers nothing
    )

    require_linux()
    if find_spec("pagewire.engine_core") is None:
        raise ValueError(
            "pagewire-client has no engine: attach to a core that runs, or install pagewire in its place"
        )
    address = address or private_address(f"core-{os.getpid()}-{uuid.uuid4().hex[:12]}")
    command = [sys.executable, "-m", "pagewire.engine_core", "--listen", address, "--options-stdin"]
    if args.has_local_worker:
        command += ["--worker-address", private_address(f"worker-{os.getpid()}-{uuid.uuid4().hex[:12]}")]
    options = msgspec.json.encode({"options": dataclasses.asdict(args), "registrations": all_registrations()})
    return SpawnedCore(Child(command, stdin=options, env=os.environ | ray_cluster.environment()), address)


def stop_core(child: Child, address: str, owner: int, timeout: float = STOP_SECONDS) -> None:
    """End a core, and remove the files of its sockets if they are left.

    owner: id of the process that started it; in a fork of that process this does nothing.
    """
    if os.getpid() != owner:
        return
    child.process.terminate()
    try:
        child.process.wait(timeout)  # before its lifeline is closed, which would end it at once
    except subprocess.TimeoutExpired:
        pass
    child.stop(KILL_SECONDS)
    if address.startswith("ipc://"):
        remove_left_overs_of(Path(address.removeprefix("ipc://")))
    sweep(runtime_dir())  # those of its workers
