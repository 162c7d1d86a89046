"""Keeps a sequence's next token within the rules for timestamps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from pagewire.ipc.timestamps import TimestampRules


class TimestampState:
    """Where a sequence is among its timestamps: a function of its output alone."""

    def __init__(self, rules: TimestampRules, output_ids: Iterable[int]) -> None:
        self._rules = rules
        self._latest: int | None = None
        # Of the last two tokens: is it a timestamp? Before the output, both count as one.
        self._before, self._last = True, True
        for token_id in output_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Record a generated token."""
        self._before, self._last = self._last, token_id >= self._rules.first
        if self._last:
            self._latest = token_id

    def copy(self) -> TimestampState:
        """A copy to which tokens can be added while this one stays as it is."""
        return copy.copy(self)

    def apply(self, row: Tensor) -> None:
        """Set the logits of tokens that may not come next to -inf, in one row float32 [V], in place."""
        first, end, max_initial = self._rules.first, self._rules.end, self._rules.max_initial
        if self._latest is None:  # the output begins
            row[:first] = -math.inf
            if max_initial is not None:
                row[first + max_initial + 1 :] = -math.inf
            return
        if self._last and self._before:
            row[first:] = -math.inf
        elif self._last:
            row[:end] = -math.inf
            row[first : self._latest] = -math.inf  # the second of a pair may be the same
        else:
            row[first : self._latest + 1] = -math.inf
        if torch.logsumexp(row[first:], 0) > row[:first].max():
            row[:first] = -math.inf
