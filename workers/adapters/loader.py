"""Loads adapters in a thread beside the steps, and keeps those that are loaded."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from pagewire.ipc.errors import error_text, error_type
from pagewire.ipc.lora import AdapterLoaded, LoadAdapter, LoRAConfig
from pagewire.ipc.worker_messages import WorkerConfig
from pagewire.kernels.deltas import AdapterRows, AdapterWeights
from pagewire.workers.adapters.base_weights import BaseWeights
from pagewire.workers.adapters.build import build
from pagewire.workers.adapters.config import AdapterConfig
from pagewire.workers.adapters.files import read_files
from pagewire.workers.adapters.targets import Targets
from pagewire.workers.batch import AdapterOrder
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError
from pagewire.workers.model.loading import LoadedModel

logger = logging.getLogger("pagewire.worker")


class Adapters:
    """The adapters of a model by the index that the core gave each.

    `load` and `drop`, and all other methods, are for the thread that runs steps. A loaded adapter can be used once
    `finished` has returned its message. wake: called by the other thread when there is such a message.
    """

    def __init__(self, config: WorkerConfig, device: Device, wake: Callable[[], None]) -> None:
        """Adapters within the limits of `config.lora`.

        Raises:
            LoadError: they cannot be served with this configuration.
        """
        if config.lora is None:
            raise LoadError("adapters need enable_lora")
        if config.parallel.stages > 1:
            raise LoadError(
                "enable_lora with pipeline_parallel_size over 1 is not served: a stage knows the modules of its "
                "own layers only. Use tensor_parallel_size, or a merged adapter (lora_path with merge)"
            )
        if config.lora.long_lora_scaling_factors:
            raise LoadError(
                "long_lora_scaling_factors are not served: the rotary angles of a model are the same in all rows. "
                "Load the model with an adapter's factor (hf_overrides) and serve the adapter there"
            )
        self._config, self._device, self._limits, self._wake = config, device, config.lora, wake
        self._base = BaseWeights(config, device)
        self._loaded: dict[int, AdapterWeights] = {}
        self._pending: dict[int, LoadAdapter] = {}
        self._orders: queue.SimpleQueue[LoadAdapter] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[LoadAdapter, AdapterLoaded, AdapterWeights | None]] = (
            queue.SimpleQueue()
        )
        self._targets: Targets | None = None
        self._thread: threading.Thread | None = None

    def attach(self, loaded: LoadedModel) -> None:
        """Make a model that was just loaded ask for adapters. Those that are loaded stay so: it is the same model.

        Raises:
            LoadError: it cannot have adapters.
        """
        self._targets = Targets.of(loaded, self._device.torch_device)

    def load(self, message: LoadAdapter) -> None:
        """Load an adapter in the thread. An index that is loaded already gets the new one, once it is there."""
        self._pending[message.index] = message
        self._orders.put(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="load-adapters", daemon=True)
            self._thread.start()

    def drop(self, index: int) -> None:
        """Free an adapter, loaded or not."""
        self._pending.pop(index, None)
        self._loaded.pop(index, None)

    def finished(self) -> list[AdapterLoaded]:
        """Messages about adapters that can be used now, or could not be loaded; not of those dropped meanwhile."""
        messages = []
        while not self._done.empty():
            order, message, weights = self._done.get()
            if self._pending.get(order.index) is not order:
                continue
            del self._pending[order.index]
            if weights is not None:
                self._loaded[order.index] = weights
            messages.append(message)
        return messages

    def rows(self, order: AdapterOrder | None) -> AdapterRows | None:
        """The rows of a batch with their adapters; None if none has one.

        Raises:
            RuntimeError: an adapter is not loaded.
        """
        if order is None:
            return None
        if missing := [index for index in order.adapters if index not in self._loaded]:
            raise RuntimeError(f"adapter {missing[0]} was planned, but is not loaded")
        adapters = [self._loaded[index] for index in order.adapters]
        return AdapterRows(order.rows, order.starts, adapters, order.num_rows)

    def num_extra_tokens(self, index: int) -> int:
        """How many tokens an adapter brings behind the model's vocabulary; 0 if it is none that is loaded."""
        adapter = self._loaded.get(index)
        return 0 if adapter is None else adapter.num_extra_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of all loaded adapters."""
        return sum(adapter.num_bytes for adapter in self._loaded.values())

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            weights = None
            try:
                if self._pending.get(order.index) is not order:
                    continue
                weights, message = self._read(order)
            except Exception as error:
                logger.warning("adapter %d was not loaded: %s", order.index, error_text(error))
                message = AdapterLoaded(order.index, error=error_text(error), error_type=error_type(error))
            self._done.put((order, message, weights))
            self._wake()

    @torch.inference_mode()
    def _read(self, order: LoadAdapter) -> tuple[AdapterWeights, AdapterLoaded]:
        if self._targets is None:
            raise RuntimeError("no model is loaded")
        limits: LoRAConfig = self._limits
        files = read_files(Path(order.path), limits.allow_pickle)
        if order.content and files.content != order.content:
            raise ValueError("its files are not those that were loaded under this name before")
        config = AdapterConfig.parse(files.config)
        weights, rank = build(config, files.tensors, self._targets, limits, self._base)
        loaded = AdapterLoaded(
            order.index, files.content, weights.num_bytes, rank, num_extra_tokens=weights.num_extra_tokens
        )
        return weights, loaded
