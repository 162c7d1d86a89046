"""What a worker takes for its cold tier, and what stands in where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagewire.ipc.wire.tier_messages import MoveBlocks, TierReport
from pagewire.workers.device.kv_size import CacheSize


class WorkerTier(Protocol):
    """KV blocks in swap space by place, and on disk by name; see `disk.DiskTier`."""

    @property
    def swap_size(self) -> CacheSize:
        """The places in the swap space, for blocks and for states."""

    def move(self, message: MoveBlocks) -> None:
        """Copy blocks out, and begin to read others; what was launched before is over."""

    def forget(self) -> None:
        """Remove all blocks of this model and layout."""

    def let_go(self) -> None:
        """Give back what the swap space takes of the memory that sleep gives back, and forget what was there."""

    def take_reports(self) -> Sequence[TierReport]:
        """What has happened since the last call."""

    def close(self) -> None:
        """End what goes on beside the steps."""


class NoTier:
    """Stands in for a tier where there is none; methods as in `WorkerTier`."""

    swap_size = CacheSize(0, 0)

    def move(self, message: MoveBlocks) -> None:
        """Nothing: the core moves blocks only where there is a tier."""

    def forget(self) -> None:
        """Nothing to do."""

    def let_go(self) -> None:
        """Nothing to give back."""

    def take_reports(self) -> Sequence[TierReport]:
        """No reports."""
        return ()

    def close(self) -> None:
        """Nothing to do."""
