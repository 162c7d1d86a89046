"""What a worker keeps of media: what the encoder has made of them, by entry, and the positions of their sequences.

Each step, `Media.lay` gives the embeddings of pictures their places in the batch, and tokens their three positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.worker_messages import Encode, Row, SlotInit, StepPlan
from pagewire.workers.batch.flat_batch import Laid
from pagewire.workers.batch.slots import Slots
from pagewire.workers.errors import first_line
from pagewire.workers.media.slices import SlicedPass
from pagewire.workers.media.tower import EncodedMedium, Tower
from pagewire.workers.step.context import Axes, Overlay


@dataclass(frozen=True)
class SequencePositions:
    """The positions of a sequence with media.

    prompt: int64 [3, L]. shift: what is added to the indices of later tokens.
    """

    prompt: NDArray[np.int64]
    shift: int


class MediaEntries:
    """The entries of a worker, in the memory of its device.

    tower: encodes. slots: of the worker.
    """

    are_taken = True

    def __init__(self, tower: Tower, slots: Slots) -> None:
        self.tower, self._slots = tower, slots
        self._entries: dict[int, tuple[int, EncodedMedium]] = {}
        self._passes: dict[
            int, SlicedPass[EncodedMedium]
        ] = {}  # that have stopped; the core begins one at a time
        self._positions: dict[int, SequencePositions] = {}
        self._unplaced: dict[int, str] = {}  # errors, by slot

    @property
    def num_layers(self) -> int:
        """Layers between which a pass of the encoder can stop; 0: it runs in one piece."""
        return self.tower.gate.num_layers

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(x.nbytes for _, made in self._entries.values() for x in (made.rows, *made.deep))

    def clear(self) -> None:
        """Drop all."""
        for entry in (*self._entries, *self._passes):
            self._let_go(entry)
        self._positions.clear()
        self._unplaced.clear()

    @torch.inference_mode()
    def apply(self, plan: StepPlan) -> None:
        """Take in what a plan frees, assigns and encodes; `Slots.apply` comes first."""
        for slot in plan.freed_slots:
            self._positions.pop(slot, None)
        for entry in plan.freed_entries:
            self._let_go(entry)
        for init in plan.inits:
            self._place(init)
        if self.tower.module is None:
            return
        for encode in plan.encodes:
            if encode.features:
                self._let_go(encode.entry)
            elif encode.entry in self._entries:  # its pass has failed before its end
                continue
            made = self._advance(encode)
            if made is None:
                continue
            if made.error and self.tower.is_part:  # the stage that answers for rows does not know
                raise RuntimeError(made.error)
            self._entries[encode.entry] = self.tower.place_ids[encode.kind], made

    def _advance(self, encode: Encode) -> EncodedMedium | None:
        """Run a pass, or a slice of it; returns what it has made, or None if it is not at its end."""
        if encode.features:
            if not encode.until:
                return self.tower.encode(encode.kind, encode.features)
            self._passes[encode.entry] = self.tower.sliced(encode.kind, encode.features)
        made = self._passes[encode.entry].advance(encode.until)
        if made is not None:
            del self._passes[encode.entry]
        return made

    def _let_go(self, entry: int) -> None:
        """Drop an entry, or the pass that has stopped on the way to it."""
        self._entries.pop(entry, None)
        if (begun := self._passes.pop(entry, None)) is not None:
            begun.abandon()

    def moves(self, slot: int) -> bool:
        """True if media change the positions of a slot's tokens, also of those behind them."""
        return slot in self._positions

    def _place(self, init: SlotInit) -> None:
        """Work out the positions of a new sequence, if media change them."""
        self._positions.pop(init.slot, None)
        self._unplaced.pop(init.slot, None)
        media = [medium for medium in init.media if not medium.embeddings]
        if not media or self.tower.axes is None:
            return
        prompt = init.token_ids[: init.num_prompt_tokens]
        try:
            positions = self.tower.positions(prompt, [grid_of(medium) for medium in media]).numpy()
        except (RuntimeError, ValueError, StopIteration) as error:  # such as of two pictures side by side
            self._unplaced[init.slot] = f"its pictures have no positions: {first_line(error)}"
            return
        shift = int(positions.max()) + 1 - len(prompt)
        self._positions[init.slot] = SequencePositions(positions, shift)

    def lay(self, rows: Sequence[Row], starts: Sequence[int], positions: Tensor) -> Laid | None:
        """What media do to a step's rows; None if nothing.

        starts: of the rows in the batch. positions: int64 [T].
        """
        has_entries = any(row.entries for row in rows)
        if not has_entries and not any(row.slot in self._positions for row in rows):
            return None
        found, axes = self._positioned(rows, starts, positions)
        overlay, errors = self._overlay(rows, starts) if has_entries else (None, {})
        runs = {i: self._runs(row) for i, row in enumerate(rows)} if self.tower.family.whole else {}
        return Laid(overlay, found, axes, errors, {i: own for i, own in runs.items() if own})

    def _runs(self, row: Row) -> list[tuple[int, int]]:
        """Where places of a row's media lie side by side: the first and the last token, counted from the row's."""
        runs: list[tuple[int, int]] = []
        for start, end, entry in row.entries:
            place_id, _ = self._entries[entry]
            here = np.flatnonzero(self._slots.tokens[row.slot, start:end] == place_id) + start - row.start
            for part in np.split(here, np.flatnonzero(np.diff(here) > 1) + 1):
                if len(part):
                    runs.append((int(part[0]), int(part[-1])))
        return runs

    def _overlay(self, rows: Sequence[Row], starts: Sequence[int]) -> tuple[Overlay | None, dict[int, str]]:
        places: list[NDArray[np.int64]] = []
        parts: list[EncodedMedium] = []
        errors = {i: self._unplaced[row.slot] for i, row in enumerate(rows) if row.slot in self._unplaced}
        if self.tower.module is None:  # a later stage gets states in which they are
            return None, errors
        for i, (row, first) in enumerate(zip(rows, starts, strict=True)):
            for start, end, entry in row.entries:
                place_id, made = self._entries[entry]
                here = np.flatnonzero(self._slots.tokens[row.slot, start:end] == place_id) + start
                if not made.error and len(here) != len(made.rows):
                    text = (
                        f"the model has made {len(made.rows)} embeddings for {len(here)} places of a medium"
                    )
                    made = EncodedMedium(made.rows, error=text)
                if made.error:
                    errors[i] = made.error
                    continue
                inside = slice(*np.searchsorted(here, (row.start, row.start + row.num_tokens)))
                places.append(here[inside] - row.start + first)
                parts.append(EncodedMedium(made.rows[inside], [deep[inside] for deep in made.deep]))
        if not sum(map(len, places)):
            return None, errors
        device = self.tower.device
        at = torch.from_numpy(np.concatenate(places)).to(device)
        deep = [torch.cat(layer) for layer in zip(*(part.deep for part in parts), strict=True)]
        return Overlay(at, torch.cat([part.rows for part in parts]), deep), errors

    def _positioned(
        self, rows: Sequence[Row], starts: Sequence[int], positions: Tensor
    ) -> tuple[Tensor | None, Axes | None]:
        """Positions int64 [T], and all three where they differ; None if no row has media that change them."""
        if self.tower.axes is None or not any(row.slot in self._positions for row in rows):
            return None, None
        found = np.repeat(positions.numpy()[None], 3, 0)
        for row, first in zip(rows, starts, strict=True):
            if (own := self._positions.get(row.slot)) is None:
                continue
            length, end = own.prompt.shape[1], row.start + row.num_tokens
            num_prompt = max(0, min(end, length) - row.start)
            found[:, first : first + num_prompt] = own.prompt[:, row.start : row.start + num_prompt]
            found[:, first + num_prompt : first + row.num_tokens] += own.shift
        one = torch.from_numpy(np.ascontiguousarray(found[0]))
        if (found == found[0]).all():
            return one, None
        device = self.tower.device
        return one, Axes(torch.from_numpy(found).to(device), self.tower.axes.to(device))


def grid_of(medium: Media) -> Tensor:
    """The grid int64 [n, 3] of a picture, which the core sends in place of its content."""
    data = torch.frombuffer(bytearray(medium.data.data), dtype=getattr(torch, medium.data.dtype))
    return data.long().view(-1, 3)
