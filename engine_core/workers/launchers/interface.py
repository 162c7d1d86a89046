"""The interface that a launcher of worker processes implements: on this machine, on others, or in a Ray cluster."""

from __future__ import annotations

from typing import Protocol

from pagewire.engine_core.workers.launchers.listener import WorkerListener


class Process(Protocol):
    """The handle on one worker process. None of its methods waits, except `reap` and `stop`.

    rank: its place in the group. identity: its ZeroMQ routing id.
    exit_fd: a file descriptor that becomes readable when the process has ended, or counts as lost.
    """

    rank: int
    identity: bytes
    exit_fd: int

    @property
    def pid(self) -> int:
        """Process id on its machine; 0 while it is not known."""

    @property
    def exit_cause(self) -> str | None:
        """How the process has ended, as text ("was killed by SIGKILL"); None while it runs."""

    @property
    def obstacle(self) -> str | None:
        """What the start of the process still waits for, as text for the log; None if for nothing."""

    def kill(self) -> None:
        """Kill the process without waiting; `exit_fd` reports its exit."""

    def reap(self) -> None:
        """Kill the process if it still runs, wait for its end as far as that can be known, and close `exit_fd`."""

    def release(self) -> None:
        """Let the process exit by itself."""

    def stop(self, timeout: float) -> None:
        """Let the process exit, kill it after `timeout` seconds, and close `exit_fd`."""


class Launcher(Protocol):
    """Starts the worker processes of one core.

    listener: the socket that they connect to. It is made with the launcher and closed by `close`.
    """

    listener: WorkerListener

    def start(self, rank: int, address: str, identity: str) -> Process:
        """Start the process of a rank: the worker program, which connects to `address` as `identity`.

        It may return before the process runs: what it waits for is its `obstacle`.

        Raises:
            OSError, MemoryError: it cannot be started now.
        """

    def start_ahead(self, rank: int, address: str) -> None:
        """Have a process ready that the next `start` of this rank can use, where that is possible. Never fails."""

    def end_ahead(self) -> None:
        """End the processes that were started ahead, if there are any."""

    def close(self) -> None:
        """Close the listener and all else that is open. No process runs any more."""
