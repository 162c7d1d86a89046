"""One worker process: its start, its exit, and the detection of a hang.

A pidfd reports an exit at once; time limits of a step, of a call and of silence during the start detect a hang.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from pagewire.ipc.lifeline import Child, exit_cause
from pagewire.ipc.worker_messages import Ready

WORKER_COMMAND = (sys.executable, "-m", "pagewire.workers.main")


class WorkerProcess:
    """A process of a worker group, which connects to `address` under an identity of its own.

    command: program and arguments; those for address, identity and lifeline are added.

    Attributes:
        rank: its place in the group. identity: its ZeroMQ routing id.
        exit_fd: a file descriptor that becomes readable when the process has ended.
        ready: its `Ready` message; None while it is loading.
        last_sign: monotonic time of its last message, or of its start.

    Raises:
        OSError, MemoryError: the process cannot be started.
    """

    def __init__(self, command: Sequence[str], address: str, identity: str, rank: int) -> None:
        self.rank, self.identity = rank, identity.encode()
        self.ready: Ready | None = None
        self._child = Child([*command, "--connect", address, "--identity", identity])
        self.last_sign = time.monotonic()
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


class Stopwatch:
    """Detects a hung worker: measures how long the oldest step in flight has been running.

    limit: seconds.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since: float | None = None

    def restart(self, running: bool) -> None:
        """Start at zero; stop if no step is running."""
        self._since = time.monotonic() if running else None

    @property
    def elapsed(self) -> float | None:
        """Seconds for which the oldest step has been running; None if no step runs."""
        return None if self._since is None else time.monotonic() - self._since

    @property
    def expired(self) -> bool:
        """True if the oldest step has been running for longer than the limit."""
        elapsed = self.elapsed
        return elapsed is not None and elapsed > self.limit
