"""What a step's layers take beside hidden states, and how they get it: data, of which all ways through a step know.

Nothing here knows of modules of transformers. These take it from `current_step`, and need not hand it down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.paging import AttentionBatch, Cache, LogitTerms
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.ops import paged_attention, store_kv
from pagewire.workers.caches.kv import PAGE, KVShape, Pages

if TYPE_CHECKING:
    from pagewire.kernels.data.deltas import AdapterRows
    from pagewire.kernels.data.states import StateBatch
    from pagewire.workers.caches.sources import SourceBatch
    from pagewire.workers.caches.states import StateShape, StepStates


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

    @property
    def halved(self) -> Axes:
        """Those for tables with equal halves, in place of tables whose neighbours are equal."""
        even = self.of_element[::2]
        return Axes(self.positions, torch.cat([even, even]))


@dataclass(frozen=True, slots=True)
class Overlay:
    """Embeddings float32 [n, E], and the places int64 [n] of their tokens in the batch.

    deep: [n, E] for each of a model's first layers, which is added to its result at these places.
    """

    places: Tensor
    rows: Tensor
    deep: Sequence[Tensor] = ()

    def over(self, embedded: Tensor) -> Tensor:
        """A copy of the embeddings [..., T, E] of a batch with these in their places, rounded to the same dtype."""
        laid = embedded.reshape(-1, embedded.shape[-1]).index_copy(
            0, self.places, self.rows.to(embedded.dtype)
        )
        return laid.view(embedded.shape)


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


class KeyIndex(Protocol):
    """Chooses the keys that a step's tokens see, see `pagewire.workers.module.indexed`.

    layer: whose indexer it is. keys: [T, size], which are cached there.
    """

    layer: int
    keys: Tensor

    def choose(self, layer: int, cache: Cache, batch: AttentionBatch) -> Tensor | None:
        """What tokens see in a layer, as `LogitTerms.chosen`; None: all keys before them."""
        ...


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
        index: KeyIndex | None = None,
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
