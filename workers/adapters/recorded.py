"""Rows with adapters in recorded steps, and which adapters such steps can have."""

from __future__ import annotations

import torch

from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.kernels.cuda.lora import DeviceRows, RowTiles, table_of
from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights
from pagewire.workers.adapters.targets import Targets

MAX_JOINED = 3
"""Modules that are one product, at most: queries, keys and values."""


class RecordedRows:
    """The rows of recorded steps that have adapters, in memory that stays where it is.

    What is recorded has no adapters of its own: rows and adapters are those that the memory names at the time of
    the replay.
    """

    def __init__(self, none: AdapterWeights, num_rows: int, width: int, device: torch.device) -> None:
        """Memory for up to `num_rows` rows.

        none: an adapter of the model that changes nothing. width: ranks that an adapter's product has, at most.
        """
        self._none, self._width = none, width
        self._tiles = RowTiles.reserve(num_rows, device)

    def first(self, size: int) -> AdapterRows:
        """The rows to record a step of `size` requests with."""
        rows = AdapterRows(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]), [self._none], size)
        rows.native = DeviceRows.recorded(self._tiles.first(size), self._width)
        return rows

    def fill(self, rows: AdapterRows) -> None:
        """Set the rows of the next replay; each adapter is one for which `why_not_recorded` is None."""
        self._tiles.fill(rows)


def max_width(limits: LoRAConfig) -> int:
    """The ranks that a product can have in a recorded step, together."""
    return MAX_JOINED * limits.max_lora_rank


def why_not_recorded(adapter: AdapterWeights, targets: Targets, width: int) -> str | None:
    """Why recorded steps cannot have an adapter, which they then run without a graph; None if they can.

    width: see `max_width`. The output layer is outside of recorded steps.
    """
    if adapter.embedding is not None:
        return "it changes the embedding of tokens"
    if any(adapter.products[number] for number in targets.heads):
        return "it changes the heads of latents (kv_b_proj)"
    table = table_of(adapter, targets.device)
    if table.others - {targets.output}:
        return "it has what kernels lack, such as weights in the place of the model's (modules_to_save)"
    if table.width > width:
        return f"a product has {table.width} ranks of it, and there is room for {width}"
    return None
