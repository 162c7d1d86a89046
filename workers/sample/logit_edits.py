"""Changes to logits before sampling: allowed tokens, bias, penalties, bad words, min_tokens, timestamps.

Every sequence has a `LogitEdits`, updated with each token; `apply_edits` makes the changes of all rows in one
sparse pass. It uses elementwise operations only, so a row never depends on the other rows.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.thinking import ThinkingState
from pagewire.workers.sample.timestamps import TimestampState
from pagewire.workers.sample.token_tables import token_tables

FLOAT32_MAX = float(torch.finfo(torch.float32).max)
FLOAT32_TINY = float(torch.finfo(torch.float32).tiny)
NO_TOKEN = -1  # in a history of tokens: no token, but a picture or an embedding


def bounded(value: float) -> float:
    """`value` clamped to float32's positive normal range, so that dividing by it cannot give 0/0 or inf/inf."""
    return min(max(value, FLOAT32_TINY), FLOAT32_MAX)


class PenaltyCounts:
    """The tokens that penalties apply to, and how often each was generated (0: only in the prompt).

    Kept in arrays that double when full: no memory of the size of the vocabulary. Those that are known at first are
    in order, and found by bisection; the others by `_later`.
    """

    def __init__(self, prompt_ids: NDArray[Any], output_ids: NDArray[Any]) -> None:
        ids, inverse = np.unique(np.concatenate((prompt_ids, output_ids)), return_inverse=True)
        counts = np.bincount(inverse[len(prompt_ids) :], minlength=len(ids))
        self._ids, self._counts = ids.astype(np.int64), counts.astype(np.float32)
        self._num_sorted = len(ids)
        self._later: dict[int, int] = {}

    def add(self, token_id: int) -> None:
        """Record a generated token."""
        index = int(self._ids[: self._num_sorted].searchsorted(token_id))
        if index == self._num_sorted or self._ids[index] != token_id:
            index = self._later.setdefault(token_id, len(self))
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(index + 16, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(index + 16, np.float32)))
        self._ids[index] = token_id
        self._counts[index] += 1

    def copy(self) -> PenaltyCounts:
        """A copy to which tokens can be added while this one stays as it is."""
        other = copy.copy(self)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        other._later = self._later.copy()
        return other

    def __len__(self) -> int:
        return self._num_sorted + len(self._later)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Token ids int64 [n], each once."""
        return self._ids[: len(self)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Counts float32 [n] of `ids`."""
        return self._counts[: len(self)]


class LogitEdits:
    """The changes to one sequence's logits. Token ids beyond the vocabulary are ignored.

    tables: the tokens that the parameters name. Arguments as for `SamplingSlot`.
    """

    def __init__(
        self,
        params: SamplingParams,
        stop_ids: Sequence[int],
        tokens: NDArray[Any],
        num_prompt_tokens: int,
        num_tokens: int,
        vocab_size: int,
    ) -> None:
        history = tokens[:num_tokens]
        self.held_back = (
            num_prompt_tokens + params.min_tokens - num_tokens
        )  # tokens still missing to min_tokens
        self.tables = token_tables(params, stop_ids if self.held_back > 0 else (), vocab_size)
        longest = self.tables.longest
        self._thinking: ThinkingState | None = None
        if params.thinking_token_budget is not None and params.thinking is not None:
            prompt, output = np.split(history, [num_prompt_tokens])
            self._thinking = ThinkingState(params.thinking_token_budget, params.thinking, prompt.tolist())
            for token_id in output.tolist():
                self._thinking.add(token_id)
        self.timestamps: TimestampState | None = None
        if params.timestamps is not None:
            self.timestamps = TimestampState(params.timestamps, history[num_prompt_tokens:].tolist())
        self._recent = deque(history[max(0, num_tokens - longest) :].tolist(), maxlen=longest)
        self.repetition = bounded(params.repetition_penalty)
        self.frequency, self.presence = params.frequency_penalty, params.presence_penalty
        self.counts: PenaltyCounts | None = None
        self._has_gaps = False
        if self.repetition != 1 or self.frequency or self.presence:
            prompt_ids = history[: num_prompt_tokens if self.repetition != 1 else 0]
            self._has_gaps = bool((prompt_ids == NO_TOKEN).any())
            self.counts = PenaltyCounts(prompt_ids[prompt_ids != NO_TOKEN], history[num_prompt_tokens:])

    def add(self, token_id: int) -> None:
        """Record a generated token."""
        if self.held_back > 0:
            self.held_back -= 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self._thinking is not None:
            self._thinking.add(token_id)
        if self.timestamps is not None:
            self.timestamps.add(token_id)
        self._recent.append(token_id)

    def copy(self) -> LogitEdits:
        """A copy to which tokens can be added while this one stays as it is."""
        other = copy.copy(self)
        other.counts = None if self.counts is None else self.counts.copy()
        other._recent = self._recent.copy()
        other._thinking = None if self._thinking is None else self._thinking.copy()
        other.timestamps = None if self.timestamps is None else self.timestamps.copy()
        return other

    @property
    def forced(self) -> int | None:
        """The only token that may come next, which ends the reasoning; None: its budget is not spent."""
        return None if self._thinking is None else self._thinking.forced

    @property
    def allowed(self) -> NDArray[np.int64] | None:
        """The tokens that may come next, int64 [n]; None: all."""
        return self.tables.allowed if self.forced is None else np.array([self.forced], np.int64)

    @property
    def active(self) -> bool:
        """True if the next token's logits are to be changed."""
        held_back = self.held_back > 0 and len(self.tables.stop_ids) > 0
        lasting = self.tables.lasting or self.counts is not None or self.timestamps is not None
        return lasting or held_back or self.forced is not None

    @property
    def is_countable(self) -> bool:
        """True if all changes are penalties by the sequence's own tokens, and stop tokens that are held back."""
        others = self.tables.lasting or self.timestamps is not None or self._thinking is not None
        return not others and not self._has_gaps

    def forbidden(self) -> NDArray[np.int64]:
        """Tokens [n] that must not come next: ends of bad words, and stop tokens before min_tokens."""
        if self.forced is not None:
            return self.tables.forbidden[:0]
        ids = [self.tables.forbidden]
        if self._recent and self._recent[-1] in self.tables.endings:
            recent = list(self._recent)
            words = self.tables.endings[recent[-1]]
            ids.append(
                np.array([last for before, last in words if recent[-len(before) :] == before], np.int64)
            )
        if self.held_back > 0:
            ids.append(self.tables.stop_ids)
        return np.concatenate(ids) if len(ids) > 1 else ids[0]


def apply_edits(x: torch.Tensor, edits: Sequence[LogitEdits]) -> None:
    """Edit float32 logits x [n, V], contiguous, in place; edits [n].

    Order: allowed tokens, bias, penalties, then -inf for bad words and min_tokens. (Setting -inf here is
    equivalent to any earlier point, as penalties do not change -inf.) Timestamps see the logits of all these edits.
    """
    for row, edit in zip(x, edits, strict=True):
        if (allowed := edit.allowed) is not None:
            _keep_only(row, allowed)
    _add_bias(x, edits)
    _penalise(x, edits)
    flat = np.concatenate([edit.forbidden() + row * x.shape[1] for row, edit in enumerate(edits)])
    if len(flat):
        x.view(-1)[torch.from_numpy(flat).to(x.device)] = -math.inf
    for row, edit in zip(x, edits, strict=True):
        if edit.timestamps is not None:
            edit.timestamps.apply(row)


def _keep_only(row: torch.Tensor, allowed: NDArray[np.int64]) -> None:
    ids = torch.from_numpy(allowed).to(row.device)
    kept = row[ids]
    row.fill_(-math.inf)
    row[ids] = kept


def _add_bias(x: torch.Tensor, edits: Sequence[LogitEdits]) -> None:
    biased = [(row, edit.tables) for row, edit in enumerate(edits) if len(edit.tables.bias_ids)]
    if biased:
        flat = np.concatenate([tables.bias_ids + row * x.shape[1] for row, tables in biased])
        at = torch.from_numpy(flat).to(x.device)
        x.view(-1)[at] += torch.from_numpy(np.concatenate([tables.biases for _, tables in biased])).to(
            x.device
        )


def _penalise(x: torch.Tensor, edits: Sequence[LogitEdits]) -> None:
    """Repetition penalty (Keskar et al. 2019, "CTRL") on prompt and output; frequency, presence on output.

    Overflows are clamped to finite values: an infinite logit would count as an error of the model.
    """
    penalised = [(row, edit, edit.counts) for row, edit in enumerate(edits) if edit.counts is not None]
    if not penalised:
        return

    def spread(values: Iterable[float]) -> torch.Tensor:
        per_token = np.repeat(
            np.array(list(values), np.float32), [len(counts.ids) for _, _, counts in penalised]
        )
        return torch.from_numpy(per_token).to(x.device)

    flat = np.concatenate([counts.ids + row * x.shape[1] for row, _, counts in penalised])
    at = torch.from_numpy(flat).to(x.device)
    times = torch.from_numpy(np.concatenate([counts.counts for _, _, counts in penalised])).to(x.device)
    repetition = spread(edit.repetition for _, edit, _ in penalised)
    frequency = spread(edit.frequency for _, edit, _ in penalised)
    presence = spread(edit.presence for _, edit, _ in penalised)

    values = x.view(-1)[at]
    values = torch.where(values < 0, values * repetition, values / repetition)
    values = values - frequency * times - presence * (times > 0)
    x.view(-1)[at] = values.clamp(max=FLOAT32_MAX)
