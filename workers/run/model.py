"""The model of a worker: loaded when it starts, dropped while it sleeps or gets other weights, and loaded again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.network.loaded import LoadedModel


class WorkerModel:
    """A model whose weights can be dropped.

    loaded: None while they are. load: loads a configuration; raises LoadError if it cannot.
    config: what is loaded the next time.

    Attributes:
        writer: a thread that writes the weights to a file; None: none does.
    """

    def __init__(
        self, loaded: LoadedModel, load: Callable[[WorkerConfig], LoadedModel], config: WorkerConfig
    ) -> None:
        self.loaded: LoadedModel | None = loaded
        self.writer: threading.Thread | None = None
        self.config, self._load = config, load

    @property
    def current(self) -> LoadedModel:
        """The loaded model.

        Raises:
            RuntimeError: its weights are dropped, because the worker sleeps.
        """
        if self.loaded is None:
            raise RuntimeError("the worker is asleep and its weights are dropped: call wake_up first")
        return self.loaded

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; 0 while they are dropped."""
        return 0 if self.loaded is None else self.loaded.weight_bytes

    def drop(self) -> None:
        """Let go of the weights, once what the next `load` reads is written."""
        if self.writer is not None:
            self.writer.join()
            self.writer = None
        self.loaded = None

    def load(self) -> None:
        """Load the weights again, if they were dropped.

        Raises:
            LoadError: they cannot be loaded.
        """
        if self.loaded is None:
            self.loaded = self._load(self.config)
