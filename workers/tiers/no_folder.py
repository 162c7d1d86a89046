"""Stands in for the folder of a worker that keeps no blocks on disk, and takes them of other cores."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire.ipc.wire.codec import Buffer
from pagewire.workers.tiers.counts import TierCounts


class NoFolder:
    """No blocks; methods as of `TierFolder`."""

    def __init__(self) -> None:
        self.counts, self.num_bytes = TierCounts(), 0

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Nothing comes or goes."""
        return [], []

    def parent_of(self, name: bytes) -> bytes | None:
        """None: no block is there."""
        return None

    def read(self, name: bytes) -> memoryview | None:
        """None: no block is there."""
        return None

    def write(self, name: bytes, parent: bytes, pieces: Sequence[Buffer]) -> bool:
        """False: there is no room."""
        return False

    def refresh(self) -> None:
        """Nothing to learn."""

    def clear(self) -> None:
        """Nothing to remove."""

    def close(self) -> None:
        """Nothing to end."""
