"""Worker processes on this machine, as children of the core. A pidfd reports their exit at once."""

from __future__ import annotations

import os
from collections.abc import Sequence

import zmq

from pagewire.engine_core.workers.launchers.early import FIRST_IDENTITY, WORKER_COMMAND, EarlyWorker
from pagewire.engine_core.workers.launchers.listener import WorkerListener
from pagewire.ipc.host.lifeline import Child, exit_cause


class LocalProcess:
    """A child process as a `Process`.

    Raises:
        OSError: there are too few file descriptors; then it is ended.
    """

    obstacle = None

    def __init__(self, child: Child, identity: str, rank: int) -> None:
        self.rank, self.identity = rank, identity.encode()
        self._child = child
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

    command: program and arguments of a worker; those for address, identity and lifeline are added.
    early: the first worker, if it was started already.

    Raises:
        OSError: the socket cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        command: Sequence[str] = WORKER_COMMAND,
        early: EarlyWorker | None = None,
    ) -> None:
        self.listener = WorkerListener.local(context, None if early is None else early.address)
        self._command, self._early = command, early

    def start(self, rank: int, address: str, identity: str) -> LocalProcess:
        """See `Launcher.start`."""
        early, self._early = self._early, None
        if early is not None and identity == FIRST_IDENTITY:
            return LocalProcess(early.child, identity, rank)
        child = Child([*self._command, "--connect", address, "--identity", identity])
        return LocalProcess(child, identity, rank)

    def close(self) -> None:
        """Close the listener."""
        self.listener.close()
