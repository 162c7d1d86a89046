"""What a worker takes for its media, and what stands in where none are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pagewire.ipc.wire.worker_messages import Row, StepPlan
from pagewire.workers.batch.flat_batch import Laid


class WorkerMedia(Protocol):
    """What the encoder has made of pictures and sounds, and where it goes; see `entries.MediaEntries`."""

    are_taken: bool
    """False if no row can have any."""

    @property
    def num_layers(self) -> int:
        """Layers between which a pass of the encoder can stop; 0: it runs in one piece."""

    def apply(self, plan: StepPlan) -> None:
        """Take in what a plan frees, assigns and encodes; `Slots.apply` comes first."""

    def lay(self, rows: Sequence[Row], starts: Sequence[int], positions: Tensor) -> Laid | None:
        """What media do to a step's rows; None if nothing.

        starts: of the rows in the batch. positions: int64 [T].
        """

    def moves(self, slot: int) -> bool:
        """True if media change the positions of a slot's tokens, also of those behind them."""

    def clear(self) -> None:
        """Drop all."""


class NoMedia:
    """Stands in for media where none are taken; methods as in `WorkerMedia`."""

    are_taken = False
    num_layers = 0

    def apply(self, plan: StepPlan) -> None:
        """Nothing to do."""

    def lay(self, rows: Sequence[Row], starts: Sequence[int], positions: Tensor) -> Laid | None:
        """Nothing."""
        return None

    def moves(self, slot: int) -> bool:
        """False."""
        return False

    def clear(self) -> None:
        """Nothing to do."""
