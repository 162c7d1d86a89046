"""Records a dry run: which caches and states a model's layers ask for, and how they attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.kernels.data.states import StateBatch
from pagewire.workers.caches.kv import KVShape
from pagewire.workers.caches.sources import SourceBatch
from pagewire.workers.caches.states import RecordedStates
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError
from pagewire.workers.step.context import StepContext


@dataclass
class AttentionCalls:
    """The calls of attention in some steps: each layer's cache shape, last window or chunk, and number of calls."""

    num_steps: int = 0
    shapes: dict[int, KVShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    num_calls: dict[int, int] = field(default_factory=dict)

    def add(self, layer: int, shape: KVShape, window: int | None) -> None:
        """Record a call."""
        self.shapes.setdefault(layer, shape)
        self.windows[layer] = window
        self.num_calls[layer] = self.num_calls.get(layer, 0) + 1


@dataclass
class DryRunRecorder:
    """Records a dry run: its calls of attention, what each layer has of the KV cache, and the states of all layers.

    sources: the layer whose keys and values each layer reads; as a rule itself.
    """

    num_blocks: int
    block_size: int
    device: Device
    num_states: int = 0
    calls: AttentionCalls = field(default_factory=AttentionCalls)
    sources: dict[int, int] = field(default_factory=dict)
    caches: dict[int, Cache] = field(default_factory=dict)
    states: RecordedStates = field(init=False)

    def __post_init__(self) -> None:
        self.states = RecordedStates(self.num_states, self.device)

    def step(
        self,
        batch: AttentionBatch,
        positions: Tensor,
        starts: Sequence[int] = (),
        states: StateBatch | None = None,
        sources: SourceBatch | None = None,
    ) -> StepContext:
        """The context of a step that is recorded here; positions, starts, sources: see `StepContext`.

        states: the slots that its rows read and write; None: its layers may keep no states.
        """
        self.calls.num_steps += sources is None or len(sources.targets) > 0
        return _RecordingContext(batch, positions, starts, self, states, sources)

    def cache(self, layer: int, shape: KVShape) -> Cache:
        """The cache of a layer, which is made when it is first used."""
        if layer not in self.caches:
            shared = self.caches.get(self.sources.get(layer, layer))
            self.caches[layer] = shared or shape.allocate(self.num_blocks, self.block_size, self.device)
        return self.caches[layer]

    def kv_shapes(self, first_layer: int) -> list[KVShape]:
        """The shape of each layer's cache, from this layer on; empty if none attends.

        One that never attends has that of the first one that does.
        """
        attending = self.calls.shapes
        shapes = []
        for layer in range(first_layer, max(attending, default=first_layer - 1) + 1):
            source = self.sources.get(layer, layer if layer in attending else min(attending))
            shape = attending.get(layer, attending[source])
            shapes.append(replace(shape, source=None if source == layer else source - first_layer))
        return shapes


class _RecordingContext(StepContext):
    __slots__ = ("_keys", "recorder")

    def __init__(
        self,
        batch: AttentionBatch,
        positions: Tensor,
        starts: Sequence[int],
        recorder: DryRunRecorder,
        states: StateBatch | None,
        sources: SourceBatch | None,
    ) -> None:
        own = None if states is None else recorder.states.step(states)
        super().__init__(batch, positions, starts=starts, states=own, sources=sources)
        self.caches = recorder.caches  # type: ignore[assignment]
        self.recorder = recorder
        self._keys: dict[tuple[object, ...], tuple[int, Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.pages is not None:
            return super().attend(layer, q, k, v, *args, **kwargs)
        # A layer that shares another one's keys and values gets the same tensors; here all stay in memory.
        place = (k.data_ptr(), v.data_ptr(), k.shape, k.stride())
        source = self._keys.setdefault(place, (layer, k, v))[0]
        if self.recorder.sources.setdefault(layer, source) != source:
            raise LoadError(f"layer {layer} does not always read the keys and values of the same layer")
        return super().attend(layer, q, k, v, *args, **kwargs)

    def cache(self, layer: int, shape: KVShape, window: int | None) -> Cache:
        if self.pages is not None:
            return super().cache(layer, shape, window)
        if shape.source is not None:
            self.recorder.sources[layer] = self.first_layer + shape.source
        self.recorder.calls.add(layer, shape, window)
        return self.recorder.cache(layer, shape)

    def store(self, layer: int, keys: Tensor, values: Tensor, kv_slots: Tensor) -> None:
        self.recorder.cache(layer, KVShape.of(keys, values))
        super().store(layer, keys, values, kv_slots)
