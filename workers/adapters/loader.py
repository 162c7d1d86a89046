"""Loads adapters beside the steps, and keeps those that are loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.ipc.errors import error_text, error_type
from pagewire.ipc.wire.lora import AdapterLoaded, LoadAdapter, LoRAConfig
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights
from pagewire.workers.adapters.base_weights import BaseWeights
from pagewire.workers.adapters.build import build
from pagewire.workers.adapters.config import AdapterConfig, check_context_length
from pagewire.workers.adapters.files import read_config, read_files
from pagewire.workers.adapters.names import Parts, add_tensor, check_any
from pagewire.workers.adapters.pieces import LARGE_BYTES, Piece, PieceRunner, Pieces
from pagewire.workers.adapters.recorded import RecordedRows, max_width, why_not_recorded
from pagewire.workers.adapters.targets import Targets, add_other_stages
from pagewire.workers.batch.flat_batch import AdapterOrder
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.ranks.interface import Collective

logger = logging.getLogger("pagewire.worker")


class Adapters:
    """The adapters of a model by the index that the core gave each.

    All methods are for the thread that runs steps. It calls `advance` between them while an adapter is being
    loaded; the adapter can be used once `finished` has returned its message. wake: called, also by another thread,
    when there is such a message, or `advance` has something to do again.
    """

    are_served = True

    def __init__(self, config: WorkerConfig, device: Device, wake: Callable[[], None]) -> None:
        """Adapters within the limits of `config.lora`.

        Raises:
            LoadError: they cannot be served with this configuration.
        """
        if config.lora is None:
            raise LoadError("adapters need enable_lora")
        if config.lora.long_lora_scaling_factors:
            raise LoadError(
                "long_lora_scaling_factors are not served: all requests of an engine have one rotary embedding "
                "and one max_model_len. Serve such an adapter in an engine of its own, with rope_scaling of "
                "hf_overrides"
            )
        self._config, self._device, self._limits, self._wake = config, device, config.lora, wake
        self._base = BaseWeights(config, device)
        self._loaded: dict[int, AdapterWeights] = {}
        self._pending: dict[int, LoadAdapter] = {}
        self._finished: list[AdapterLoaded] = []
        self._pieces = PieceRunner(wake)
        self._targets: Targets | None = None
        self._replayed: dict[int, bool] = {}  # adapters whose steps may be recorded ones, or not

    def attach(self, loaded: LoadedModel, ranks: Collective) -> None:
        """Make a model that was just loaded ask for adapters. Those that are loaded stay so: it is the same model.

        ranks: of the group, which call this together.

        Raises:
            LoadError: it cannot have adapters.
        """
        self._targets = Targets.of(loaded, self._device.torch_device)
        if self._config.parallel.stages > 1:
            add_other_stages(self._targets, ranks, self._config.parallel)

    def load(self, message: LoadAdapter) -> None:
        """Begin to load an adapter. An index that is loaded already gets the new one, once it is there."""
        self._pending[message.index] = message
        self._pieces.start(self._load(message))

    def advance(self) -> bool:
        """Go on with loading for a few milliseconds at most; returns True if there is more to do at once."""
        return self._pieces.advance()

    def drop(self, index: int) -> None:
        """Free an adapter, loaded or not."""
        self._pending.pop(index, None)
        self._replayed.pop(index, None)
        if (weights := self._loaded.pop(index, None)) is not None and weights.num_bytes > LARGE_BYTES:
            self._pieces.start(let_go(weights))
        self._finished = [message for message in self._finished if message.index != index]

    def finished(self) -> list[AdapterLoaded]:
        """Messages about adapters that can be used now, or could not be loaded; not of those dropped meanwhile."""
        messages, self._finished = self._finished, []
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

    def recorded_rows(self, num_rows: int) -> RecordedRows:
        """Memory for the rows with adapters of recorded steps of up to `num_rows` rows."""
        return RecordedRows(
            self._attached.weights(), num_rows, max_width(self._limits), self._device.torch_device
        )

    def can_replay(self, indices: NDArray[np.int64]) -> bool:
        """True if a recorded step can have rows of these adapters; 0 stands for none."""
        return all(self._can_replay(index) for index in set(indices.tolist()) - {0})

    def num_extra_tokens(self, index: int) -> int:
        """How many tokens an adapter brings behind the model's vocabulary; 0 if it is none that is loaded."""
        adapter = self._loaded.get(index)
        return 0 if adapter is None else adapter.num_extra_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of all loaded adapters."""
        return sum(adapter.num_bytes for adapter in self._loaded.values())

    def _can_replay(self, index: int) -> bool:
        if (known := self._replayed.get(index)) is not None:
            return known
        if (adapter := self._loaded.get(index)) is None:
            return False
        reason = why_not_recorded(adapter, self._attached, max_width(self._limits))
        if reason is not None:
            logger.info("steps with adapter %d are launched kernel by kernel: %s", index, reason)
        self._replayed[index] = reason is None
        return reason is None

    @property
    def _attached(self) -> Targets:
        if self._targets is None:
            raise RuntimeError("no model is loaded")
        return self._targets

    def _load(self, order: LoadAdapter) -> Iterator[Piece]:
        """Load an adapter, unless it is dropped meanwhile."""
        weights, reading = None, self._read(order)
        try:
            while True:
                with torch.inference_mode():
                    piece = next(reading)
                yield piece
                if self._pending.get(order.index) is not order:
                    return
        except StopIteration as end:
            weights, message = end.value
        except Exception as error:
            logger.warning("adapter %d was not loaded: %s", order.index, error_text(error))
            message = AdapterLoaded(order.index, error=error_text(error), error_type=error_type(error))
        yield Piece.SHORT  # in the thread of the steps
        if self._pending.get(order.index) is order:
            del self._pending[order.index]
            if weights is not None:
                self._loaded[order.index] = weights
                self._replayed.pop(order.index, None)
            self._finished.append(message)
            self._wake()

    def _read(self, order: LoadAdapter) -> Pieces[tuple[AdapterWeights, AdapterLoaded]]:
        yield Piece.LONG
        limits: LoRAConfig = self._limits
        settings = read_config(Path(order.path))
        yield Piece.SHORT
        targets = self._attached
        config, modules = AdapterConfig.parse(settings), dict[str, Parts]()
        if config.fields.context_length > 0:
            check_context_length(config.fields.context_length, self._config)
        max_bytes = targets.max_file_bytes(config, limits)
        yield Piece.LONG
        files = read_files(Path(order.path), settings, limits.allow_pickle, max_bytes)
        if order.content and files.content != order.content:
            raise ValueError("its files are not those that were loaded under this name before")
        yield Piece.LONG if files.is_pickle else Piece.SHORT
        for name, tensor in files.tensors():
            add_tensor(modules, name, tensor)
            yield Piece.SHORT
        check_any(modules)
        weights, rank = yield from build(config, modules, targets, limits, self._base)
        loaded = AdapterLoaded(
            order.index, files.content, weights.num_bytes, rank, num_extra_tokens=weights.num_extra_tokens
        )
        if len(files.data) > LARGE_BYTES:
            self._pieces.start(let_go(files))
        return weights, loaded


def let_go(memory: object) -> Iterator[Piece]:
    """Drop a reference to much memory, which then goes back to the system."""
    yield Piece.LONG
    del memory
