"""Changes to logits before sampling: allowed tokens, bias, penalties, bad words, min_tokens.

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

from pagewire.ipc.params import SamplingParams

FLOAT32_MAX = float(torch.finfo(torch.float32).max)
FLOAT32_TINY = float(torch.finfo(torch.float32).tiny)
NO_TOKEN = -1  # in a history of tokens: no token, but a picture or an embedding


def bounded(value: float) -> float:
    """`value` clamped to float32's positive normal range, so that dividing by it cannot give 0/0 or inf/inf."""
    return min(max(value, FLOAT32_TINY), FLOAT32_MAX)


class PenaltyCounts:
    """The tokens that penalties apply to, and how often each was generated (0: only in the prompt).

    Kept in arrays that double when full: O(1) per token, and no memory of the size of the vocabulary.
    """

    def __init__(self, prompt_ids: NDArray[Any], output_ids: NDArray[Any]) -> None:
        ids, inverse = np.unique(np.concatenate((prompt_ids, output_ids)), return_inverse=True)
        counts = np.bincount(inverse[len(prompt_ids) :], minlength=len(ids))
        self._ids, self._counts = ids.astype(np.int64), counts.astype(np.float32)
        self._index = {token_id: i for i, token_id in enumerate(ids.tolist())}

    def add(self, token_id: int) -> None:
        """Record a generated token."""
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(index + 16, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(index + 16, np.float32)))
        self._ids[index] = token_id
        self._counts[index] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Token ids int64 [n], each once."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Counts float32 [n] of `ids`."""
        return self._counts[: len(self._index)]


class BadWords:
    """Forbidden token sequences: the last token of each is forbidden after the others.

    history: token ids so far, prompt and output.
    """

    def __init__(self, words: Iterable[Sequence[int]], history: NDArray[Any]) -> None:
        self._always: list[int] = []
        self._after: dict[int, list[tuple[list[int], int]]] = {}  # keyed by the last but one token
        for *prefix, last in filter(None, words):
            if prefix:
                self._after.setdefault(prefix[-1], []).append((prefix, last))
            else:
                self._always.append(last)
        longest = max((len(prefix) for words in self._after.values() for prefix, _ in words), default=0)
        self._recent = deque(history[max(0, len(history) - longest) :].tolist(), maxlen=longest)

    def add(self, token_id: int) -> None:
        """Record a generated token."""
        self._recent.append(token_id)

    def forbidden(self) -> list[int]:
        """Tokens that would complete a bad word as the next token."""
        if not self._recent or self._recent[-1] not in self._after:
            return self._always
        recent = list(self._recent)
        words = self._after[recent[-1]]
        return self._always + [last for prefix, last in words if recent[-len(prefix) :] == prefix]


class LogitEdits:
    """The changes to one sequence's logits. Token ids beyond the vocabulary are ignored.

    Arguments as for `SamplingSlot`.
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
        self.vocab_size = vocab_size
        self.held_back = (
            num_prompt_tokens + params.min_tokens - num_tokens
        )  # tokens still missing to min_tokens
        self.stop_ids = list(stop_ids) if self.held_back > 0 else []
        self.allowed: NDArray[np.int64] | None = None
        if params.allowed_token_ids is not None:
            self.allowed = np.array([i for i in params.allowed_token_ids if i < vocab_size], np.int64)
        bias = {i: bias for i, bias in (params.logit_bias or {}).items() if i < vocab_size}
        self.bias_ids, self.biases = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        self.bad_words = BadWords(params.bad_words_token_ids, history) if params.bad_words_token_ids else None
        self.repetition = bounded(params.repetition_penalty)
        self.frequency, self.presence = params.frequency_penalty, params.presence_penalty
        self.counts: PenaltyCounts | None = None
        if self.repetition != 1 or self.frequency or self.presence:
            prompt_ids = history[: num_prompt_tokens if self.repetition != 1 else 0]
            self.counts = PenaltyCounts(prompt_ids[prompt_ids != NO_TOKEN], history[num_prompt_tokens:])

    def add(self, token_id: int) -> None:
        """Record a generated token."""
        if self.held_back > 0:
            self.held_back -= 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self.bad_words is not None:
            self.bad_words.add(token_id)

    def copy(self) -> LogitEdits:
        """A copy to which tokens can be added while this one stays as it is."""
        other = copy.copy(self)
        other.counts, other.bad_words = copy.deepcopy(self.counts), copy.deepcopy(self.bad_words)
        return other

    @property
    def active(self) -> bool:
        """True if the next token's logits are to be changed."""
        lasting = self.allowed is not None or len(self.bias_ids) or self.counts or self.bad_words
        return bool(lasting or (self.held_back > 0 and self.stop_ids))

    def forbidden(self) -> list[int]:
        """Tokens that must not come next: ends of bad words, and stop tokens before min_tokens."""
        ids = self.bad_words.forbidden() if self.bad_words is not None else []
        ids = ids + self.stop_ids if self.held_back > 0 else ids
        return [i for i in ids if 0 <= i < self.vocab_size]


def apply_edits(x: torch.Tensor, edits: Sequence[LogitEdits]) -> None:
    """Edit float32 logits x [n, V], contiguous, in place; edits [n].

    Order: allowed tokens, bias, penalties, then -inf for bad words and min_tokens. (Setting -inf last is
    equivalent to any earlier point, as penalties do not change -inf.)
    """
    for row, edit in zip(x, edits, strict=True):
        if edit.allowed is not None:
            _keep_only(row, edit.allowed)
    _add_bias(x, edits)
    _penalise(x, edits)
    ids = [(row, i) for row, edit in enumerate(edits) for i in edit.forbidden()]
    if ids:
        rows, columns = torch.tensor(ids, device=x.device).unbind(1)
        x[rows, columns] = -math.inf


def _keep_only(row: torch.Tensor, allowed: NDArray[np.int64]) -> None:
    ids = torch.from_numpy(allowed).to(row.device)
    kept = row[ids]
    row.fill_(-math.inf)
    row[ids] = kept


def _add_bias(x: torch.Tensor, edits: Sequence[LogitEdits]) -> None:
    biased = [(row, edit) for row, edit in enumerate(edits) if len(edit.bias_ids)]
    if biased:
        flat = np.concatenate([edit.bias_ids + row * x.shape[1] for row, edit in biased])
        at = torch.from_numpy(flat).to(x.device)
        x.view(-1)[at] += torch.from_numpy(np.concatenate([edit.biases for _, edit in biased])).to(x.device)


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
