"""What a worker takes for its adapters, and what stands in where none are served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagewire.ipc.wire.lora import AdapterLoaded, LoadAdapter
from pagewire.kernels.data.deltas import AdapterRows
from pagewire.workers.batch.flat_batch import AdapterOrder
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.ranks.interface import Collective


class ReplayedRows(Protocol):
    """Memory for the rows of recorded steps that have adapters; see `recorded.RecordedRows`."""

    def first(self, size: int) -> AdapterRows:
        """The rows to record a step of `size` requests with."""
        ...

    def fill(self, rows: AdapterRows) -> None:
        """Set the rows of the next replay."""


class WorkerAdapters(Protocol):
    """The adapters of a model by the index that the core gave each; see `loader.Adapters`."""

    are_served: bool
    """False if no row can have one."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all loaded adapters."""

    def attach(self, loaded: LoadedModel, ranks: Collective) -> None:
        """Make a model that was just loaded ask for adapters. ranks: of the group, which call this together.

        Raises:
            LoadError: it cannot have adapters.
        """

    def load(self, message: LoadAdapter) -> None:
        """Begin to load an adapter."""

    def advance(self) -> bool:
        """Go on with loading for a few milliseconds at most; returns True if there is more to do at once."""

    def drop(self, index: int) -> None:
        """Free an adapter, loaded or not."""

    def finished(self) -> Sequence[AdapterLoaded]:
        """Messages about adapters that can be used now, or could not be loaded."""

    def rows(self, order: AdapterOrder | None) -> AdapterRows | None:
        """The rows of a batch with their adapters; None if none has one.

        Raises:
            RuntimeError: an adapter is not loaded.
        """

    def recorded_rows(self, num_rows: int) -> ReplayedRows | None:
        """Memory for the rows with adapters of recorded steps of up to `num_rows` rows; None: they have none."""

    def can_replay(self, indices: NDArray[np.int64]) -> bool:
        """True if a recorded step can have rows of these adapters; 0 stands for none."""

    def num_extra_tokens(self, index: int) -> int:
        """How many tokens an adapter brings behind the model's vocabulary; 0 if it is none that is loaded."""


class NoAdapters:
    """Stands in for adapters where none are served; methods as in `WorkerAdapters`."""

    are_served = False
    num_bytes = 0

    def attach(self, loaded: LoadedModel, ranks: Collective) -> None:
        """Nothing to do."""

    def load(self, message: LoadAdapter) -> None:
        """Nothing: the core asks for adapters only where they are served."""

    def advance(self) -> bool:
        """False: there is nothing to do."""
        return False

    def drop(self, index: int) -> None:
        """Nothing to do."""

    def finished(self) -> Sequence[AdapterLoaded]:
        """No messages."""
        return ()

    def rows(self, order: AdapterOrder | None) -> AdapterRows | None:
        """None: no row may have an adapter.

        Raises:
            RuntimeError: a row has one.
        """
        if order is not None:
            raise RuntimeError("a row has an adapter, but enable_lora is off")
        return None

    def recorded_rows(self, num_rows: int) -> ReplayedRows | None:
        """None: recorded steps have no such rows."""
        return None

    def can_replay(self, indices: NDArray[np.int64]) -> bool:
        """True if no row has an adapter."""
        return not indices.any()

    def num_extra_tokens(self, index: int) -> int:
        """0."""
        return 0
