"""Runs the attention of a Hugging Face module on the paged KV cache, and its recurrences on state slots.

`attend` is registered in transformers' `AttentionInterface` under `NAME`. It takes the step's metadata from
`current_step`, so a module need not hand anything down to its layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewire.kernels.data.deltas import AdapterRows
from pagewire.kernels.data.paging import AttentionBatch, Cache, LogitTerms
from pagewire.kernels.data.states import StateBatch
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.ops import paged_attention, store_kv
from pagewire.workers.caches.kv import PAGE, KVShape, Pages
from pagewire.workers.caches.sources import SourceBatch
from pagewire.workers.caches.states import RecordedStates, StateShape, StepStates
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError
from pagewire.workers.module.indexed import IndexedTokens
from pagewire.workers.module.overlay import Overlay

NAME = "pagewire"


@dataclass(frozen=True)
class Axes:
    """The three positions of a step's tokens, of time, height and width (M-RoPE).

    positions: int64 [3, T]. of_element: int64 [rot_dim]: which of them turns each element of a head.
    """

    positions: Tensor
    of_element: Tensor

    def rows(self, table: Tensor) -> Tensor:
        """The rows [T, rot_dim] of a table [P, rot_dim] of angles, each element at its own position."""
        elements = torch.arange(table.shape[1], device=table.device)
        return table[self.positions.index_select(0, self.of_element).T, elements]


class RowsContext:
    """What linear layers know of the rows that they are given; within `with rows:` they get it.

    adapters: the rows that have adapters; None: none has.
    """

    __slots__ = ("_outer", "adapters")

    def __init__(self, adapters: AdapterRows | None = None) -> None:
        self.adapters = adapters
        self._outer: RowsContext | None = None

    def __enter__(self) -> None:
        """Make this the thread's current context."""
        self._outer, _running.rows = _running.rows, self

    def __exit__(self, *_: object) -> None:
        """Make the context before it the current one again, as a rule none."""
        _running.rows = self._outer


class StepContext(RowsContext):
    """What a step's layers take beside hidden states.

    Within `with step:`, attention and linear layers get it from `current_step`.

    Args:
        batch: whose attention it is. A model that encodes has it `in_pages`.
        positions: int64 [T]; of long sequences, rows in tables of angles (`Slots.long_from`).
        caches: of all layers from `first_layer` on; those before it are on other stages of a pipeline.
        adapters: the rows that have adapters; None: none has.
        overlay: embeddings that take the place of those of tokens; None: there are none.
        token_types: int64 [T], 1 in the second texts of pairs; None: all 0.
        starts: the index in the batch of each request's first token, for a model that runs prompt by prompt.
        received: hidden states [T, H] of the stage before, which are overwritten; None where the model begins.
        states: of a model whose layers keep some; None: of another.
        sources: of an encoder-decoder; None: of another.
        axes: the three positions of each token, where they differ; None: `positions` are all there is.
    """

    __slots__ = (
        "_num_pages",
        "axes",
        "batch",
        "caches",
        "first_layer",
        "overlay",
        "pages",
        "positions",
        "received",
        "sources",
        "starts",
        "states",
        "token_types",
    )

    def __init__(
        self,
        batch: AttentionBatch,
        positions: Tensor,
        caches: Sequence[Cache] = (),
        first_layer: int = 0,
        *,
        adapters: AdapterRows | None = None,
        overlay: Overlay | None = None,
        token_types: Tensor | None = None,
        starts: Sequence[int] = (),
        received: Tensor | None = None,
        states: StepStates | None = None,
        sources: SourceBatch | None = None,
        axes: Axes | None = None,
    ) -> None:
        super().__init__(adapters)
        self.batch, self.positions, self.caches, self.first_layer = batch, positions, caches, first_layer
        self.overlay, self.token_types, self.starts, self.received = overlay, token_types, starts, received
        self.states, self.sources, self.axes = states, sources, axes
        self.pages: Pages | None = None
        self._num_pages = 0

    def use(self, pages: Pages) -> None:
        """Take these for keys and values: the model encodes, and the batch is `in_pages`."""
        self.pages, self._num_pages = pages, sum(-(-length // PAGE) for length in self.lengths)

    def within(self, batch: AttentionBatch, positions: Tensor) -> StepContext:
        """The context of a part of the step's tokens, with the same caches."""
        part = copy(self)
        part.batch, part.positions = batch, positions
        return part

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each request."""
        return [end - start for start, end in pairwise([*self.starts, len(self.positions)])]

    @property
    def places(self) -> Tensor:
        """The place of each token in its sequence, int64 [T]; any number for padding."""
        starts, tokens = (
            self.batch.query_start_loc,
            torch.arange(len(self.positions), device=self.positions.device),
        )
        requests = torch.searchsorted(starts, tokens, right=True).clamp_max(len(starts) - 1)
        return tokens - starts[requests] + self.batch.seq_lens[requests - 1]

    def cache(self, layer: int, shape: KVShape, window: int | None) -> Cache:
        """The cache of a layer. In a model that encodes, pages that the next layer may overwrite.

        window: the most keys that a query sees, which the dry run records; None: all up to its own.
        """
        if self.pages is not None:
            return self.pages.of(shape, self._num_pages, self.positions.device)
        return self.caches[layer - self.first_layer]

    def store(self, layer: int, keys: Tensor, values: Tensor, kv_slots: Tensor) -> None:
        """Store keys [n, Hkv, D] and values [n, Hkv, Dv] of a layer to which only later calls attend."""
        store_kv(keys, values, self.caches[layer - self.first_layer], kv_slots)

    def future(self, window: int | None) -> int:
        """How many keys after its own a query sees, given the layer's window.

        In a model that encodes all, or those of a window to each side that has the query's own in it.
        """
        return 0 if self.pages is None else LogitTerms.two_sided(window).future

    def hand_on(
        self, shape: StateShape, values: Tensor, kernel: Callable[[Tensor, StateBatch], Tensor]
    ) -> Tensor:
        """Run a kernel that hands a state of this shape from token to token; returns a tensor like values [T, ...].

        kernel: takes the states float32 [num_states, *shape] and the slots that rows read and write.
        """
        assert self.states is not None, "the model's layers keep states"
        return kernel(self.states.take(shape), self.states.batch)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        index: IndexedTokens | None = None,
        chunk: int | None = None,
        relative_bias: Tensor | None = None,
    ) -> Tensor:
        """Store k [T, Hkv, D] and v [T, Hkv, Dv] of a layer, then attend with q [T, Hq, D]. Returns [T, Hq, Dv].

        v may be a view of k's first elements, which are then cached once. index: chooses the keys that tokens see,
        of this layer or of one before it.
        """
        own_index = None if index is None or index.layer != layer else index.keys
        size, key_size = v.shape[-1], k.shape[-1]
        latents = implementation_for(q, k, v).latents if size < key_size else None
        if latents is not None and (key_size, size) not in latents:
            # The cache has zeros behind values, and so have the weighted sums.
            v = functional.pad(v, (0, key_size - size))
        shape = KVShape.of(k, v, own_index)
        cache = self.cache(layer, shape, window or chunk)
        store_kv(k, v, cache, self.batch.slot_mapping)
        chosen = None if index is None else index.choose(layer, cache, self.batch)
        future = self.future(window)
        terms = LogitTerms(window, future, softcap, sinks, alibi, relative_bias, chosen=chosen, chunk=chunk)
        out = paged_attention(q, cache, self.batch, scale, terms)
        return out if out.shape[-1] == size else out[..., :size]


class _Running(threading.local):
    rows: RowsContext | None = None


_running = _Running()


def current_step() -> StepContext:
    """The step whose layers are running.

    Raises:
        RuntimeError: none is.
    """
    if not isinstance(step := _running.rows, StepContext):
        raise RuntimeError("attention or a linear layer was called outside of a step")
    return step


def is_in_step() -> bool:
    """True while layers run in a step, so that attention is ours; False while the original module runs."""
    return isinstance(_running.rows, StepContext)


def step_axes() -> Axes | None:
    """The three positions of the running step's tokens, where they differ; None outside of a step."""
    return step.axes if isinstance(step := _running.rows, StepContext) else None


def current_adapters() -> AdapterRows | None:
    """The rows with adapters, of those that linear layers are given now; None if there are none."""
    return None if (rows := _running.rows) is None else rows.adapters


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
        self.recorder.calls.add(layer, shape, window)
        return self.recorder.cache(layer, shape)

    def store(self, layer: int, keys: Tensor, values: Tensor, kv_slots: Tensor) -> None:
        self.recorder.cache(layer, KVShape.of(keys, values))
        super().store(layer, keys, values, kv_slots)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: IndexedTokens | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls.

    query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv]; returns [1, T, Hq, Dv]. Keys and values may be
    latents, see `latent.py`. position_bias: by distance float32 [Hq, 2 R], see `LogitTerms.relative_bias`.

    Raises:
        LoadError: the model builds a mask of its own, or runs several batches at once.
    """
    if attention_mask is not None and indices is None:
        raise LoadError("it builds its own attention mask or bias")
    if len(query) != 1:
        raise LoadError("it runs attention over several batches at once")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if not q.dtype == k.dtype == v.dtype:  # norms of some models leave queries and keys in float32
        q, k = q.to(v.dtype), k.to(v.dtype)
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer: Any = getattr(module, "layer_idx", -1)  # some encoders do not number their layers
    heads: Any = getattr(module, "latent_heads", None)
    q = q if heads is None else heads.queries(q)
    out = current_step().attend(
        layer,
        q,
        k,
        v,
        scale,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        index=indices,
        relative_bias=position_bias,
    )
    return (out if heads is None else heads.outputs(out))[None], None


def register() -> None:
    """Register `attend` with transformers under `NAME`, without a mask function."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
