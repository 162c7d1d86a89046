"""The grammar masks of a step's samples, as the sampler uses them. The core computes them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pagewire.ipc.wire.worker_messages import Masks

NO_BITS = torch.empty(0, 0, dtype=torch.int32)


@dataclass(frozen=True)
class TokenMasks:
    """Masks of a step's samples; one without a mask may be any token.

    mask_rows: for each sample with a mask, the row of `bits` that is its mask.
    bits: int32 [n, ceil(V / 32)]: bit i % 32 of word i // 32 is set if token i is allowed.
    """

    mask_rows: dict[int, int] = field(default_factory=dict)
    bits: torch.Tensor = NO_BITS

    @classmethod
    def of(cls, masks: Masks | None) -> TokenMasks:
        """Convert a message; None: no masks."""
        if masks is None or not masks.samples:
            return cls()
        bits = np.frombuffer(masks.bits.data, np.int32).reshape(masks.bits.shape).copy()  # owned and writable
        return cls({sample: row for row, sample in enumerate(masks.samples)}, torch.from_numpy(bits))

    def widened(self, vocab_size: int) -> TokenMasks:
        """The same for a larger vocabulary, of whose further tokens a grammar allows none."""
        missing = -(-vocab_size // 32) - self.bits.shape[1]
        if not self.mask_rows or missing <= 0:
            return self
        return TokenMasks(self.mask_rows, torch.nn.functional.pad(self.bits, (0, missing)))

    def __contains__(self, sample: int) -> bool:
        return sample in self.mask_rows

    def of_rows(self, num_samples: int) -> torch.Tensor | None:
        """Masks int32 [num_samples, ceil(V / 32)] of all samples; None if none has a mask."""
        if not self.mask_rows:
            return None
        if list(self.mask_rows.items()) == [(row, row) for row in range(num_samples)]:
            return self.bits
        everything = torch.full((num_samples, self.bits.shape[1]), -1, dtype=torch.int32)
        everything[list(self.mask_rows)] = self.bits[list(self.mask_rows.values())]
        return everything
