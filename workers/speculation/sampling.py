"""Draws drafts: with the random number that the model's own token of that position will be drawn with.

A token is a function of its logits and of one number, which depends on seed and position only. With the same number
and similar logits a drafter draws the same token far more often than it would draw the likeliest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import msgspec
from torch import Tensor

from pagewire.workers.device.interface import TokenSampler
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.sampler import SamplingSlot


class Draft:
    """The drafts of one request so far, and the sampler's state behind them."""

    def __init__(self, slot: SamplingSlot, limit: int) -> None:
        """slot: the state before the first draft, which is not changed. limit: the number of drafts wanted."""
        self.limit = limit
        self.token_ids: list[int] = []
        self.state = slot
        self._is_own = False
        if slot.params.logprobs is not None:  # they take time, and those of drafts are not returned
            self.state = copy(slot)
            self.state.params = msgspec.structs.replace(slot.params, logprobs=None)

    @property
    def goes_on(self) -> bool:
        """True if more drafts are wanted."""
        return len(self.token_ids) < self.limit

    def append(self, token_id: int) -> None:
        """Add the next draft."""
        self.token_ids.append(token_id)
        if self._is_own:
            self.state.append(token_id)
        elif self.goes_on:
            self.state, self._is_own = self.state.ahead([token_id]), True


def extend_drafts(sampler: TokenSampler, logits: Tensor, drafts: Sequence[Draft]) -> None:
    """Draw the next draft of each, from logits [n, V]. One whose logits allow no token gets no more drafts."""
    output = sampler.launch(logits, [draft.state for draft in drafts], TokenMasks()).finish()
    for index, (draft, token_id) in enumerate(zip(drafts, output.token_ids, strict=True)):
        if index in output.errors:
            draft.limit = len(draft.token_ids)
        else:
            draft.append(token_id)
