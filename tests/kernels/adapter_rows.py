"""Batches whose rows have adapters, for tests of the kernels that add them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights


def make_rows(adapters: Sequence[AdapterWeights], of_rows: Sequence[int]) -> AdapterRows:
    """of_rows: each row's adapter, -1 for none."""
    used = sorted(set(of_rows) - {-1})
    rows = [[row for row, index in enumerate(of_rows) if index == adapter] for adapter in used]
    starts = torch.tensor([0, *(len(group) for group in rows)]).cumsum(0)
    flat = torch.tensor([row for group in rows for row in group], dtype=torch.int64)
    return AdapterRows(flat, starts, [adapters[index] for index in used], len(of_rows))
