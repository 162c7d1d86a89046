"""A worker that is started before the core has imported what starts workers, so that both load at the same time."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pagewire.ipc.host.lifeline import Child

WORKER_COMMAND = (sys.executable, "-m", "pagewire.workers.process.main")


def identity_of(start: int, rank: int) -> str:
    """The name of a rank's process at its socket. start: how often the group was started by then."""
    return f"worker-{start}-{rank}"


FIRST_IDENTITY = identity_of(1, 0)


@dataclass(frozen=True)
class EarlyWorker:
    """A worker that `LocalLauncher` will find running.

    child: its process. address: where it connects, as soon as the core listens there.
    """

    child: Child
    address: str

    @classmethod
    def start(cls, address: str) -> EarlyWorker:
        """Start it. It may show its progress: the user of the frontend that has spawned the core waits for it.

        Raises:
            OSError, MemoryError: the process cannot be started.
        """
        command = [*WORKER_COMMAND, "--connect", address, "--identity", FIRST_IDENTITY, "--progress"]
        return cls(Child(command), address)
