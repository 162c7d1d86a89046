"""The last sampled token of every slot, kept on the device.

So step N+1 can be launched before the host has read the tokens of step N.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Relay:
    """The last sampled token of each slot; `tokens` is int64 [max_num_seqs] on the device."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def keep(self, slots: Tensor, token_ids: Tensor) -> None:
        """Store the tokens int64 [n] sampled for slots int64 [n]."""
        self.tokens.index_copy_(0, slots, token_ids)

    def fill(self, input_ids: Tensor) -> Tensor:
        """`input_ids` int64 [T], with placeholders -1 - slot (see `batch.Batch`) replaced by the slots' tokens."""
        return torch.where(input_ids < 0, self.tokens[(-1 - input_ids).clamp_min(0)], input_ids)
