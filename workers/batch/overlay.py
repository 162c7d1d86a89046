"""Embeddings that prompts bring themselves, laid over those of the tokens whose place they take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.ipc.wire.worker_messages import Row
from pagewire.workers.step.context import Overlay


def both(brought: Overlay | None, encoded: Overlay | None) -> Overlay | None:
    """The embeddings that rows bring, and those that the encoder has made, on one device."""
    if brought is None or encoded is None:
        return encoded if brought is None else brought
    rows = torch.cat([brought.rows, encoded.rows.float()])
    nothing = torch.zeros_like(brought.rows)
    deep = [torch.cat([nothing, layer.float()]) for layer in encoded.deep]
    return Overlay(torch.cat([brought.places, encoded.places]), rows, deep)


def overlay_of(rows: Sequence[Row], starts: Sequence[int]) -> Overlay | None:
    """The embeddings that a step's rows bring; None if none does. starts: of the rows in the batch."""
    places: list[Tensor] = []
    values: list[Tensor] = []
    for row, start in zip(rows, starts, strict=True):
        for medium in row.media:
            first = start + medium.start - row.start
            places.append(torch.arange(first, first + medium.num_tokens))
            data = torch.frombuffer(bytearray(medium.data.data), dtype=getattr(torch, medium.data.dtype))
            values.append(data.view(medium.data.shape).float())
    return Overlay(torch.cat(places), torch.cat(values)) if places else None
