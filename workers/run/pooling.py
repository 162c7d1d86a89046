"""Pooled rows of a step: their hidden states go into their prompts' results, which are returned when whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.ipc.errors import NotFiniteError
from pagewire.ipc.wire.codec import Tensor as PlainTensor
from pagewire.ipc.wire.worker_messages import Row, RowResult, StepResult
from pagewire.workers.batch.slots import Slots
from pagewire.workers.network.pooler import Pooler, PoolingSlot


@dataclass(frozen=True)
class PooledRow:
    """A row that pools.

    index: of the row in its plan. slot: what its prompt has pooled so far.
    first: the place of its first hidden state among the step's.
    """

    index: int
    row: Row
    slot: PoolingSlot
    first: int


def pool_rows(
    pooler: Pooler, rows: Sequence[PooledRow], hidden: Tensor, slots: Slots, result: StepResult
) -> None:
    """Pool the hidden states [T, H] of a step's rows; results, and errors, go into the step's result."""
    if (together := _together(pooler, rows, hidden)) is not None:
        for each, values in zip(rows, together.numpy(), strict=True):
            result.rows[each.index].pooled = PlainTensor("float32", values.shape, values.tobytes())
        return
    for each in rows:
        row, end = each.row, each.row.start + each.row.num_tokens
        ids = torch.from_numpy(slots.tokens[row.slot, row.start : end])
        states = hidden[each.first : each.first + row.num_tokens]
        try:
            pooled = pooler.add(each.slot, states, row.start, ids)
        except ValueError as error:
            result.rows[each.index] = RowResult(error=str(error), error_type=NotFiniteError.__name__)
            continue
        if pooled is not None:
            values = pooled.cpu().contiguous()
            result.rows[each.index].pooled = PlainTensor(
                "float32", tuple(values.shape), values.numpy().tobytes()
            )


def _together(pooler: Pooler, rows: Sequence[PooledRow], hidden: Tensor) -> Tensor | None:
    """The results [n, D] of rows, on the host, if they are whole prompts side by side; None: one by one."""
    lengths = [each.row.num_tokens for each in rows]
    if any(length < each.slot.num_tokens for length, each in zip(lengths, rows, strict=True)):
        return None
    if rows[-1].first + lengths[-1] != sum(lengths):
        return None  # other rows stand between them
    ends = torch.tensor(lengths, device=hidden.device).cumsum(0)
    pooled = pooler.together([each.slot for each in rows], hidden[: sum(lengths)], ends)
    return None if pooled is None else pooled.cpu().contiguous()
