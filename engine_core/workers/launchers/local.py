"""Worker processes on this machine, as children of the core. A pidfd reports their exit at once.

A process may be started ahead of the start that needs it: it imports what a worker needs, which takes most of a
small model's start, and waits for its identity. It then goes on as that worker.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from pagewire.engine_core.workers.launchers.early import FIRST_IDENTITY, WORKER_COMMAND, EarlyWorker
from pagewire.engine_core.workers.launchers.listener import WorkerListener
from pagewire.ipc.errors import error_text
from pagewire.ipc.host.lifeline import Child, exit_cause

logger = logging.getLogger("pagewire.core")


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


@dataclass(frozen=True)
class SpareWorker:
    """A process that waits for its identity. identity_fd: a pipe to write it to."""

    child: Child
    identity_fd: int

    @classmethod
    def start(cls, command: Sequence[str], address: str) -> SpareWorker:
        """Start it.

        Raises:
            OSError, MemoryError: the process cannot be started.
        """
        read_fd, write_fd = os.pipe()
        try:
            options = ["--connect", address, "--identity-from", str(read_fd)]
            return cls(Child([*command, *options], pass_fds=[read_fd]), write_fd)
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)

    def become(self, identity: str) -> Child | None:
        """Let it go on as a worker; None if it has ended."""
        try:
            os.write(self.identity_fd, identity.encode())
        except BrokenPipeError:
            return None
        finally:
            os.close(self.identity_fd)
        return self.child if self.child.poll() is None else None

    def end(self) -> None:
        """Kill it."""
        os.close(self.identity_fd)
        self.child.kill()


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
        self._spares: dict[int, SpareWorker] = {}

    def start(self, rank: int, address: str, identity: str) -> LocalProcess:
        """See `Launcher.start`."""
        early, self._early = self._early, None
        if early is not None and identity == FIRST_IDENTITY:
            return LocalProcess(early.child, identity, rank)
        spare = self._spares.pop(rank, None)
        child = None if spare is None else spare.become(identity)
        if child is None:
            child = Child([*self._command, "--connect", address, "--identity", identity])
        return LocalProcess(child, identity, rank)

    def start_ahead(self, rank: int, address: str) -> None:
        """See `Launcher.start_ahead`."""
        if rank in self._spares:
            return
        try:
            self._spares[rank] = SpareWorker.start(self._command, address)
        except (OSError, MemoryError) as error:
            logger.warning("no worker is started ahead of the next loss: %s", error_text(error))

    def end_ahead(self) -> None:
        """See `Launcher.end_ahead`."""
        for spare in self._spares.values():
            spare.end()
        self._spares.clear()

    def close(self) -> None:
        """End the processes that were started ahead, and close the listener."""
        self.end_ahead()
        self.listener.close()
