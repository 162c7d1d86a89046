"""Which tokens the rows of a step may sample: packed bits, from the grammars in the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pagewire.ipc.messages import Masks

NO_BITS = torch.empty(0, 0, dtype=torch.int32)


@dataclass(frozen=True)
class TokenMasks:
    """Masks by place among the rows that sample; rows without one may sample anything.

    places: where in `bits` the mask of a row is.
    bits: int32 [n, ceil(V / 32)]: bit i % 32 of word i // 32 is set if token i may come.
    """

    places: dict[int, int] = field(default_factory=dict)
    bits: torch.Tensor = NO_BITS

    @classmethod
    def of(cls, masks: Masks | None, sample_rows: Sequence[int]) -> TokenMasks:
        """From a message, whose rows are the plan's. sample_rows: those of the plan's rows that sample."""
        if masks is None or not masks.rows:
            return cls()
        places = {row: place for place, row in enumerate(masks.rows)}
        bits = np.frombuffer(masks.bits.data, np.int32).reshape(masks.bits.shape).copy()  # owned and writable
        found = {i: places[row] for i, row in enumerate(sample_rows) if row in places}
        return cls(found, torch.from_numpy(bits))

    def __contains__(self, row: int) -> bool:
        return row in self.places

    def of_rows(self, num_rows: int) -> torch.Tensor | None:
        """The masks of all rows that sample, int32 [num_rows, ceil(V / 32)]; None if none has one."""
        if not self.places:
            return None
        if list(self.places.items()) == [(row, row) for row in range(num_rows)]:
            return self.bits
        everything = torch.full((num_rows, self.bits.shape[1]), -1, dtype=torch.int32)
        everything[list(self.places)] = self.bits[list(self.places.values())]
        return everything
