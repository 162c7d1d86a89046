"""Tokens that no one on the host has seen yet: drawn in one step, run in the next, which was launched behind it."""

from __future__ import annotations

import torch
from torch import Tensor


class Relay:
    """The last token drawn for each slot, on the device."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def keep(self, slots: Tensor, token_ids: Tensor) -> None:
        """Tokens int64 [n] were drawn for slots int64 [n]."""
        self.tokens.index_copy_(0, slots, token_ids)

    def fill(self, input_ids: Tensor) -> Tensor:
        """Token ids int64 [T], where -1 - slot stood for the last token of a slot (see `batch.Batch`)."""
        return torch.where(input_ids < 0, self.tokens[(-1 - input_ids).clamp_min(0)], input_ids)
