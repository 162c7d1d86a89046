"""The actor that runs worker processes on one bundle of a placement group. Ray starts it on the bundle's node."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping

from pagewire.ipc.host.lifeline import Child

WORKER_PROGRAM = ("-m", "pagewire.workers.process.main")


class WorkerHost:
    """Runs one worker process at a time, the ordinary worker program, as a child that ends with this process."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._identity = ""
        self._lock = threading.Lock()  # Ray runs each call on another thread

    def start(self, address: str, identity: str, key: str, environment: Mapping[str, str]) -> int:
        """Start a worker, after killing the one before it. Returns its process id.

        address: of the core. identity: ZeroMQ routing id of the worker. key: of the group, as text.
        environment: variables for the worker, of which those that this process has keep their values.

        Raises:
            OSError: it cannot be started.
        """
        command = [sys.executable, *WORKER_PROGRAM, "--connect", address, "--identity", identity]
        with self._lock:
            if self._child is not None:
                self._child.kill()
            child_environment = {**environment, **os.environ}
            self._child = Child([*command, "--key", "-"], stdin=key.encode(), env=child_environment)
            self._identity = identity
            return self._child.pid

    def wait(self, identity: str) -> int:
        """Wait for the end of a worker. Returns its exit status: that of SIGKILL if another has taken its place."""
        with self._lock:
            child = self._child if identity == self._identity else None
        return -signal.SIGKILL if child is None else child.process.wait()

    def end(self, identity: str, kill: bool) -> None:
        """Kill a worker, or let it exit by itself; nothing if another has taken its place."""
        with self._lock:
            if self._child is not None and identity == self._identity:
                if kill:
                    self._child.process.kill()
                self._child.release()
