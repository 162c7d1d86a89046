"""A drafter of layers that continue from the model's states, with a KV cache in the blocks of the model's own.

At each position p of a sequence, the first layer gets a state of the model at p and the token at p + 1, and draws
the token at p + 2. Each layer behind it gets what the layer before made at p, and the token after the one that this
layer got. When all layers have run, the last one runs again for each further draft, one position on: there, what it
made before takes the place of a state that does not exist yet.

The layers must see every token of every step. The entry of a position in the cache of the n-th layer depends on the
next n tokens as well. Where these are not known yet they are drafts, or missing, so in all layers but the first the
entries of the last positions are made again in the next step (`Tails`). In a shared block such tokens may be
another sequence's: drafts after a shared prefix start from a few entries that are slightly off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.ipc.wire.worker_messages import StepPlan, WorkerConfig
from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.workers.batch.slots import Slots
from pagewire.workers.caches.kv import KVShape, allocate_caches
from pagewire.workers.device.interface import Device, TokenSampler
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.speculation.interface import RowOver
from pagewire.workers.speculation.places import Places
from pagewire.workers.speculation.sampling import Draft, extend_drafts

Caches = Sequence[Cache]


class StateLayers(Protocol):
    """Layers that continue from the model's states."""

    name: str
    """See `Drafter.name`."""

    @property
    def shapes(self) -> Sequence[KVShape]:
        """The shape of each layer's KV cache."""

    @property
    def weight_bytes(self) -> int:
        """See `Drafter.weight_bytes`."""

    def load(self, target: LoadedModel) -> None:
        """See `Drafter.load`."""

    def unload(self) -> None:
        """See `Drafter.unload`."""

    def features(self, hidden: Tensor) -> Tensor:
        """See `Drafter.features`."""

    def begin(self, features: Tensor) -> Tensor:
        """The states [T, S] that the first layer starts from, of features [T, F]."""

    def forward(
        self,
        index: int,
        state: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        caches: Caches,
    ) -> tuple[Tensor, Tensor]:
        """A layer's output [T, S], which the next one starts from, and what its logits are made of [T, H].

        index: of the layer. state: [T, S]. token_ids, positions: int64 [T]. caches: of all layers.
        """

    def logits(self, index: int, normed: Tensor) -> Tensor:
        """Logits [n, V], by the second result [n, H] of a layer."""


class Span(NamedTuple):
    """A row's part of a step: the layers run over the positions [start, end) of its slot, then over drafts."""

    slot: int
    start: int
    end: int
    draft: Draft

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.end - self.start

    def token_ids(self, slots: Slots, ahead: int) -> NDArray[np.int64]:
        """The token `ahead` places after each position; 0 where there is neither a token nor a draft yet."""
        first, num_tokens = self.start + ahead, int(slots.num_tokens[self.slot])
        known = slots.tokens[self.slot, first : min(self.end + ahead, num_tokens)]
        drafts = np.array(self.draft.token_ids[max(0, first - num_tokens) :], np.int64)
        found = np.concatenate([known, drafts])[: self.length]
        ids = np.zeros(self.length, np.int64)
        ids[: len(found)] = found
        return ids


class Tails:
    """The features of each slot's last positions, whose entries in later layers are made again."""

    def __init__(self, size: int) -> None:
        """size: the number of positions; 0: none are kept."""
        self._size = size
        self._kept: dict[int, tuple[int, Tensor]] = {}  # by slot: the position behind them, and [n, F]

    def forget(self, slot: int) -> None:
        """Drop those of a slot, which has a new sequence."""
        self._kept.pop(slot, None)

    def clear(self) -> None:
        """Drop all."""
        self._kept.clear()

    def continued(self, slot: int, start: int, features: Tensor) -> tuple[int, Tensor]:
        """The features [n, F] from position `start` on with those kept before them, and where these begin."""
        end, kept = self._kept.get(slot, (start, features[:0]))
        if end == start and len(kept):
            start, features = start - len(kept), torch.cat([kept, features])
        if self._size:
            self._kept[slot] = start + len(features), features[-self._size :].clone()
        return start, features


class StateDrafter:
    """A drafter of `StateLayers`; methods as in `interface.Drafter`."""

    follows = True

    def __init__(
        self,
        layers: StateLayers,
        config: WorkerConfig,
        num_drafts: int,
        slots: Slots,
        device: Device,
        sampler: TokenSampler,
    ) -> None:
        """layers: loaded. config, slots, sampler: of the model. num_drafts: that are wanted at most."""
        self.layers, self._config, self._num_drafts = layers, config, num_drafts
        self._slots, self._device, self._sampler = slots, device, sampler
        self._tails = Tails(len(layers.shapes) - 1)
        self._num_blocks, self._num_spare = 0, -(-num_drafts // config.block_size)
        self.name: str | None = layers.name
        self.block_bytes = sum(shape.block_bytes(config.block_size) for shape in layers.shapes)
        self.spare_bytes = config.max_num_seqs * self._num_spare * self.block_bytes
        self.caches: list[Cache] = []

    @property
    def weight_bytes(self) -> int:
        """See `Drafter.weight_bytes`."""
        return self.layers.weight_bytes

    def features(self, hidden: Tensor) -> Tensor | None:
        """See `Drafter.features`."""
        return self.layers.features(hidden)

    def load(self, target: LoadedModel) -> None:
        """See `Drafter.load`."""
        self.layers.load(target)

    def unload(self) -> None:
        """See `Drafter.unload`."""
        self.layers.unload()

    def allocate(self, num_blocks: int) -> None:
        """See `Drafter.allocate`."""
        count = num_blocks + self._config.max_num_seqs * self._num_spare
        size = self._config.block_size
        self.caches = allocate_caches(self.layers.shapes, count, size, self._device)
        self._num_blocks = num_blocks

    def free(self) -> None:
        """See `Drafter.free`."""
        self.caches = []
        self._tails.clear()

    def apply(self, plan: StepPlan) -> None:
        """See `Drafter.apply`. What the cache holds is what the model's own holds, so blocks need no note."""
        for init in plan.inits:
            self._tails.forget(init.slot)

    def propose(self, rows: Sequence[RowOver], features: Tensor | None) -> list[list[int]]:
        """See `Drafter.propose`: runs the layers over all tokens of the step, then the last over one draft each."""
        assert features is not None, "the layers follow every step"
        spans, parts = self._spans(rows, features)
        last = len(self.layers.shapes) - 1
        ends = [span.end + max(span.draft.limit - last - 1, 0) for span in spans]
        slot_ids = [span.slot for span in spans]
        places = Places(self._slots, slot_ids, max(ends), self._num_blocks, self._num_spare, self._device)
        state = self._follow(spans, self.layers.begin(torch.cat(parts)), places)
        active = [i for i, span in enumerate(spans) if span.draft.goes_on]
        while active:
            drafts = [spans[i].draft for i in active]
            starts = [spans[i].end + len(spans[i].draft.token_ids) - last - 1 for i in active]
            ids = np.array([draft.token_ids[-1] for draft in drafts], np.int64)
            state, normed = self._forward(last, places, active, state, ids, starts, [1] * len(active))
            extend_drafts(self._sampler, self.layers.logits(last, normed), drafts)
            kept = [place for place, draft in enumerate(drafts) if draft.goes_on]
            active, state = [active[place] for place in kept], self._take(state, kept)
        return [span.draft.token_ids for span in spans]

    def _spans(self, rows: Sequence[RowOver], features: Tensor) -> tuple[list[Span], list[Tensor]]:
        """The rows' parts of this step, and the features of each."""
        spans, parts = [], []
        for row in rows:
            own = features[row.first : row.first + row.num_tokens]
            start, part = self._tails.continued(row.slot, row.start, own)
            draft = Draft(self._slots.sampling[row.slot], min(row.num_drafts, self._num_drafts))
            spans.append(Span(row.slot, start, row.start + row.num_tokens, draft))
            parts.append(part)
        return spans, parts

    def _follow(self, spans: Sequence[Span], state: Tensor, places: Places) -> Tensor:
        """Run each layer over all positions, and draw a draft from it.

        Returns what the last layer made at the last positions of spans whose drafts go on.
        """
        rows, lengths = range(len(spans)), [span.length for span in spans]
        starts, lasts = [span.start for span in spans], np.cumsum(lengths) - 1
        for index in range(len(self.layers.shapes)):
            ids = np.concatenate([span.token_ids(self._slots, index + 1) for span in spans])
            state, normed = self._forward(index, places, rows, state, ids, starts, lengths)
            if active := [i for i in rows if spans[i].draft.goes_on]:
                logits = self.layers.logits(index, self._take(normed, lasts[active]))
                extend_drafts(self._sampler, logits, [spans[i].draft for i in active])
        return self._take(state, lasts[[i for i in rows if spans[i].draft.goes_on]])

    def _take(self, x: Tensor, index: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """These rows of x."""
        (at,) = self._device.upload([torch.from_numpy(np.asarray(index, np.int64))])
        return x.index_select(0, at)

    def _forward(
        self,
        index: int,
        places: Places,
        rows: Sequence[int],
        state: Tensor,
        token_ids: NDArray[np.int64],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """A layer at positions [start, start + length) of rows; see `StateLayers.forward`."""
        positions, batch = places.tensors(rows, starts, lengths)
        (ids,) = self._device.upload([torch.from_numpy(self._slots.in_vocabulary(token_ids))])
        return self.layers.forward(index, state, ids, positions, batch, self.caches)
