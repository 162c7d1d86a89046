"""Worker processes on this machine, as children of the core. A pidfd reports their exit at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import zmq

from pagewire.engine_core.workers.launchers.listener import Listener
from pagewire.ipc.lifeline import Child, exit_cause

WORKER_COMMAND = (sys.executable, "-m", "pagewire.workers.main")


class LocalProcess:
    """A child process as a `Process`.

    command: program and arguments; those for address, identity and lifeline are added.

    Raises:
        OSError, MemoryError: the process cannot be started.
    """

    obstacle = None

    def __init__(self, command: Sequence[str], address: str, identity: str, rank: int) -> None:
        self.rank, self.identity = rank, identity.encode()
        self._child = Child([*command, "--connect", address, "--identity", identity])
        try:
            self.exit_fd = os.pidfd_open(self._child.pid)
        except BaseException:
            self._child.kill()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def exit_cause(self) -> str | None:
        """How the process has ended, as text; None while it runs."""
        status = self._child.poll()
        return None if status is None else exit_cause(status)

    def kill(self) -> None:
        """Kill the process without waiting; `exit_fd` reports its exit."""
        self._child.process.kill()

    def reap(self) -> None:
        """Kill the process if it still runs, wait for its end, and close `exit_fd`."""
        self._child.kill()
        os.close(self.exit_fd)

    def release(self) -> None:
        """Let the process exit by itself."""
        self._child.release()

    def stop(self, timeout: float) -> None:
        """Let the process exit, kill it after `timeout` seconds, and close `exit_fd`."""
        self._child.stop(timeout)
        os.close(self.exit_fd)


class LocalLauncher:
    """Starts worker processes as children of this one.

    command: the program of a worker.

    Raises:
        OSError: the socket cannot be bound.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], command: Sequence[str] = WORKER_COMMAND
    ) -> None:
        self.listener = Listener.local(context)
        self._command = command

    def start(self, rank: int, address: str, identity: str) -> LocalProcess:
        """See `Launcher.start`."""
        return LocalProcess(self._command, address, identity, rank)

    def close(self) -> None:
        """Close the listener."""
        self.listener.close()
