"""Builds the flat batch of tokens that one step runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.ipc.wire.worker_messages import Row
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.kernels.data.states import StateBatch
from pagewire.workers.batch.overlay import overlay_of
from pagewire.workers.batch.slots import Slots
from pagewire.workers.caches.sources import SourceBatch
from pagewire.workers.step.context import Axes, Overlay


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """The rows of a batch that have adapters, ordered by adapter; see `kernels.deltas.AdapterRows`."""

    adapters: list[int]
    """The index of each adapter."""
    rows: Tensor
    """int64 [n]."""
    starts: Tensor
    """int64 [len(adapters) + 1]."""
    num_rows: int

    @classmethod
    def of(cls, adapters: NDArray[np.int64]) -> AdapterOrder | None:
        """The order of rows with these adapters int64 [R], 0 for none; None if none has one."""
        if not adapters.any():
            return None
        rows = adapters.argsort(kind="stable")
        rows = rows[np.count_nonzero(adapters == 0) :]
        indices, starts = np.unique(adapters[rows], return_index=True)
        ends = torch.from_numpy(np.append(starts, len(rows)).astype(np.int64))
        return cls(indices.tolist(), torch.from_numpy(rows), ends, len(adapters))


@dataclass(frozen=True)
class Laid:
    """What media do to a step.

    overlay: embeddings over places of the batch, on the device; None: there are none.
    positions: int64 [T], in place of the batch's; None: these stay. axes: where tokens have three; None: one each.
    errors: of rows whose media could not be encoded, by row.
    runs: by row, the first and the last token of neighbouring places of a medium, which see each other; empty where
        attention is causal.
    """

    overlay: Overlay | None
    positions: Tensor | None
    axes: Axes | None
    errors: Mapping[int, str]
    runs: Mapping[int, Sequence[tuple[int, int]]]

    def on(self, batch: Batch, rows: Sequence[Row]) -> Batch:
        """A batch on the host with this: with other positions, and places that attend to each other both ways."""
        positions = batch.positions if self.positions is None else self.positions
        attention = with_runs(batch, rows, self.runs) if self.runs else batch.attention
        return replace(batch, media=self, positions=positions, attention=attention)

    def ids(self, input_ids: Tensor) -> Tensor:
        """Token ids that the model can look up: those of places may be beyond its vocabulary."""
        return input_ids if self.overlay is None else input_ids.index_fill(0, self.overlay.places, 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one step: T tokens of R requests in the order of the plan's rows, then padding, if any."""

    input_ids: Tensor
    """int64 [T]; -1 - slot stands for the last token of that slot, still on the device (`slots.Relay`)."""
    positions: Tensor
    """int64 [T]; of long sequences, rows in tables of angles (`Slots.long_from`)."""
    attention: AttentionBatch
    sample_rows: list[int]
    """For each sample, the index of its row in the plan."""
    sample_indices: Tensor
    """int64 [len(sample_rows)]: for each sample, the index in the batch of the token before it."""
    sample_slots: Tensor
    """int64 [len(sample_rows)]: the slot of each sample."""
    starts: list[int]
    """For each row, the index of its first token in the batch."""
    needs_relay: bool
    """True if `input_ids` has placeholders for tokens that only the device knows."""
    drafted: bool
    """True if some rows have drafts."""
    token_types: Tensor | None = None
    """int64 [T]: 1 in the second texts of pairs; None if no row has one."""
    adapters: AdapterOrder | None = None
    """The tokens that have adapters; None: none has."""
    sample_adapters: AdapterOrder | None = None
    """The samples that have adapters; None: none has."""
    overlay: Overlay | None = None
    """Embeddings that rows bring; None if none does."""
    media: Laid | None = None
    """What pictures do to the step; None if nothing."""
    states: StateBatch | None = None
    """The state slots that rows read and write; None if the model's layers keep no states."""
    sources: SourceBatch | None = None
    """Of an encoder-decoder; None: of another model."""
    received: Tensor | None = None
    """Hidden states [T, H] of the stage before, on the device, to be overwritten; None where the model begins."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the device reads, in the order that `with_tensors` takes."""
        about_tokens = (self.input_ids, self.positions, self.sample_indices, self.sample_slots)
        token_types = () if self.token_types is None else (self.token_types,)
        embeddings = () if self.overlay is None else (self.overlay.places, self.overlay.rows)
        states = () if self.states is None else (self.states.row_starts, self.states.spans)
        sources = () if self.sources is None else self.sources.tensors
        return (*about_tokens, *self.attention.tensors, *token_types, *states, *sources, *embeddings)

    def with_attention(self, attention: AttentionBatch) -> Batch:
        """The batch with another layout of its attention; itself if it has this one."""
        return self if attention is self.attention else replace(self, attention=attention)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Batch:
        """A copy with other `tensors`, such as their copies on the device."""
        input_ids, positions, sample_indices, sample_slots, *others = tensors
        attention, others = self.attention.with_tensors(others[:4]), others[4:]
        token_types = None if self.token_types is None else others.pop(0)
        states = None if self.states is None else StateBatch(others.pop(0), others.pop(0))
        sources = self.sources
        if sources is not None:
            sources, others = sources.with_tensors(others[:10]), others[10:]
        return replace(
            self,
            input_ids=input_ids,
            positions=positions,
            sample_indices=sample_indices,
            sample_slots=sample_slots,
            attention=attention,
            token_types=token_types,
            states=states,
            sources=sources,
            overlay=Overlay(others[0], others[1]) if others else None,
        )


def build_batch(rows: Sequence[Row], slots: Slots, padded_tokens: int = 0, padded_rows: int = 0) -> Batch:
    """The batch of `rows`; `slots.apply` must have been called for their plan.

    padded_tokens, padded_rows: pad the batch to as many (CUDA graphs have fixed sizes). A padding request has
    seq_len 0 and no token, and a padding token KV slot -1: they read and write no KV, and no span of states.
    """
    per_row = [[row.slot for row in rows], [row.start for row in rows], [row.num_tokens for row in rows]]
    slot_ids, starts, lengths = np.array(per_row, np.int64)
    ends = lengths.cumsum()
    num_tokens, max_query_len = int(ends[-1]), int(lengths.max())
    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    query_start_loc[1:] = ends

    token_slots, positions = slot_ids, starts
    if max_query_len > 1 or num_tokens < len(rows):
        token_slots = np.repeat(slot_ids, lengths)
        positions = np.arange(num_tokens) + np.repeat(starts - (ends - lengths), lengths)
    input_ids = slots.tokens[token_slots, positions]
    on_device = positions >= slots.num_tokens[token_slots]
    needs_relay = bool(on_device.any())
    if needs_relay:
        input_ids[on_device] = -1 - token_slots[on_device]
    drafted = any(row.drafts for row in rows)
    if drafted:
        for row, end in zip(rows, ends, strict=True):
            input_ids[end - len(row.drafts) : end] = row.drafts
    blocks = positions // slots.block_size
    # A token is as far into its block in the cache as it is in the request.
    kv_slot_mapping = positions + (slots.block_table[token_slots, blocks] - blocks) * slots.block_size

    seq_lens = starts + lengths
    max_seq_len = int(seq_lens.max())
    block_table = slots.block_table[slot_ids, : -(-max_seq_len // slots.block_size)]
    sample_rows, sample_indices = _samples(rows, ends, drafted)
    more, more_tokens = max(0, padded_rows - len(rows)), max(0, padded_tokens - num_tokens)
    adapters = slots.adapters[slot_ids]
    places = query_start_loc[:-1].tolist()
    attention = AttentionBatch(
        query_start_loc=_padded(query_start_loc, more, num_tokens),
        seq_lens=_padded(seq_lens.astype(np.int32), more),
        block_table=_padded(block_table, more),
        slot_mapping=_padded(kv_slot_mapping, more_tokens, -1),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    return Batch(
        input_ids=_padded(input_ids, more_tokens),
        positions=_padded(positions + slots.long_from[token_slots], more_tokens),
        attention=attention,
        sample_rows=sample_rows,
        sample_indices=torch.from_numpy(sample_indices),
        sample_slots=torch.from_numpy(slot_ids[sample_rows]),
        starts=places,
        needs_relay=needs_relay,
        drafted=drafted,
        token_types=_token_types(rows, slots, positions),
        adapters=AdapterOrder.of(np.repeat(adapters, lengths)) if adapters.any() else None,
        sample_adapters=AdapterOrder.of(adapters[sample_rows]) if adapters.any() else None,
        overlay=overlay_of(rows, places),
        states=_states(rows, places, more) if rows[0].states else None,
        sources=slots.source_batch(attention, rows),
    )


def with_runs(
    batch: Batch, rows: Sequence[Row], runs: Mapping[int, Sequence[tuple[int, int]]]
) -> AttentionBatch:
    """Attention in which each run of a row, and what lies between two, is a request of its own.

    They share the row's blocks, and each sees the keys before it, as if the row had come in several steps.
    """
    attention = batch.attention
    lengths: list[int] = []
    ends: list[int] = []
    owners: list[int] = []
    whole: list[int] = []
    for i, row in enumerate(rows):
        begin = 0
        for first, last in [*runs.get(i, ()), (row.num_tokens, row.num_tokens - 1)]:
            for start, end, is_run in ((begin, first, 0), (first, last + 1, 1)):
                if end > start:
                    lengths.append(end - start)
                    ends.append(row.start + end)
                    owners.append(i)
                    whole.append(is_run)
            begin = last + 1
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return replace(
        attention,
        query_start_loc=starts,
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=attention.block_table[owners].contiguous(),
        max_query_len=max(lengths),
        whole=torch.tensor(whole, dtype=torch.int32),
    )


def _samples(
    rows: Sequence[Row], ends: NDArray[np.int64], drafted: bool
) -> tuple[list[int], NDArray[np.int64]]:
    """`Batch.sample_rows` and `sample_indices`. ends: of the rows in the batch. drafted: some have drafts."""
    if not drafted:
        sample_rows = [i for i, row in enumerate(rows) if row.num_samples]
        return sample_rows, ends[sample_rows] - 1
    sample_rows = [i for i, row in enumerate(rows) for _ in range(row.num_samples)]
    num_later = [n for row in rows for n in range(row.num_samples)[::-1]]
    return sample_rows, ends[sample_rows] - 1 - np.array(num_later, np.int64)


def _states(rows: Sequence[Row], places: Sequence[int], more: int) -> StateBatch:
    """The state slots that rows read and write.

    places: of each row's first token in the batch. more: padding requests behind them.
    """
    starts, spans = [0], list[tuple[int, int, int, int]]()
    for row, place in zip(rows, places, strict=True):
        first, read = place, row.state
        for end, written in row.states:
            last = place + end - row.start
            spans.append((first, last, read, written))
            first, read = last, written
        starts.append(len(spans))
    starts += starts[-1:] * more
    return StateBatch(torch.tensor(starts, dtype=torch.int32), torch.tensor(spans, dtype=torch.int32))


def _token_types(rows: Sequence[Row], slots: Slots, positions: NDArray[np.int64]) -> Tensor | None:
    """`Batch.token_types`; positions: of all tokens."""
    tasks = [slots.pooling[row.slot].task if row.pool else None for row in rows]
    if not any(task is not None and task.second_segment for task in tasks):
        return None
    seconds = [(task.second_segment if task is not None else 0) or positions.max() + 1 for task in tasks]
    starts = np.repeat(np.array(seconds, np.int64), [row.num_tokens for row in rows])
    return torch.from_numpy((positions >= starts).astype(np.int64))


def _padded(array: NDArray[Any], more: int, value: int = 0) -> Tensor:
    """`array` followed by `more` rows of `value`, as a tensor."""
    if more:
        array = np.concatenate((array, np.full((more, *array.shape[1:]), value, array.dtype)))
    return torch.from_numpy(array)
