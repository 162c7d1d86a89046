"""The grammar masks of a step, as the sampler uses them. The core computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pagewire.ipc.messages import Masks

NO_BITS = torch.empty(0, 0, dtype=torch.int32)


@dataclass(frozen=True)
class TokenMasks:
    """Masks of the rows that sample; a row without a mask may sample any token.

    mask_rows: for each index among the rows that sample, the row of `bits` with its mask.
    bits: int32 [n, ceil(V / 32)]: bit i % 32 of word i // 32 is set if token i is allowed.
    """

    mask_rows: dict[int, int] = field(default_factory=dict)
    bits: torch.Tensor = NO_BITS

    @classmethod
    def of(cls, masks: Masks | None, sample_rows: Sequence[int]) -> TokenMasks:
        """Convert a message, which counts rows in the plan. sample_rows: the plan's rows that sample, in order."""
        if masks is None or not masks.rows:
            return cls()
        by_plan_row = {plan_row: mask_row for mask_row, plan_row in enumerate(masks.rows)}
        bits = np.frombuffer(masks.bits.data, np.int32).reshape(masks.bits.shape).copy()  # owned and writable
        mask_rows = {i: by_plan_row[row] for i, row in enumerate(sample_rows) if row in by_plan_row}
        return cls(mask_rows, torch.from_numpy(bits))

    def __contains__(self, row: int) -> bool:
        return row in self.mask_rows

    def of_rows(self, num_rows: int) -> torch.Tensor | None:
        """Masks int32 [num_rows, ceil(V / 32)] of all rows that sample; None if no row has a mask."""
        if not self.mask_rows:
            return None
        if list(self.mask_rows.items()) == [(row, row) for row in range(num_rows)]:
            return self.bits
        everything = torch.full((num_rows, self.bits.shape[1]), -1, dtype=torch.int32)
        everything[list(self.mask_rows)] = self.bits[list(self.mask_rows.values())]
        return everything
