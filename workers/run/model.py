"""The model of a worker: loaded when it starts, dropped while it sleeps, and loaded again."""

from __future__ import annotations

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.adapters.interface import WorkerAdapters
from pagewire.workers.device.interface import Device
from pagewire.workers.network.loaded import LoadedModel, Phases
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.weight_cache.ahead import WeightsAhead
from pagewire.workers.weight_cache.cached_loading import load


class WorkerModel:
    """A model whose weights can be dropped.

    loaded: None while they are. adapters: each loaded model is made to ask for them.
    ahead: reads packed weights already. phases: gets those of loading.

    Raises:
        LoadError: it cannot be loaded, or cannot have the adapters.
    """

    def __init__(
        self,
        config: WorkerConfig,
        device: Device,
        collective: Collective,
        adapters: WorkerAdapters,
        ahead: WeightsAhead,
        phases: Phases,
    ) -> None:
        self._config, self._device, self._collective = config, device, collective
        self._adapters = adapters
        self.loaded: LoadedModel | None = self._load(ahead, phases)

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
        """Let go of the weights."""
        self.loaded = None

    def load(self) -> None:
        """Load the weights again, if they were dropped.

        Raises:
            LoadError: they cannot be loaded.
        """
        if self.loaded is None:
            self.loaded = self._load(WeightsAhead(self._config), Phases(lambda phase, seconds: None))

    def _load(self, ahead: WeightsAhead, phases: Phases) -> LoadedModel:
        loaded = load(ahead, phases, self._device, self._collective)
        self._adapters.attach(loaded, self._collective)
        return loaded
