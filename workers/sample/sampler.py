"""Samples tokens from logits.

    logits -> grammar                                                  (masks.py)
           -> allowed tokens, bias, bad words, penalties, min_tokens   (logit_edits.py)
           -> temperature -> min_p -> top_k -> top_p -> draw           (`Kernels.draw`)
           -> a draft in the place of the drawn token, if it is typical (typical.py)

Rows that need the same stages are processed together, a few at a time to limit scratch memory; stages that no
row needs are skipped. A row's token depends on its logits, parameters, seed and history alone, not on the rest of
the batch: edits are elementwise, sums are of integers, and random numbers are a function of seed and position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.ipc.errors import NotFiniteError
from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.tasks import without
from pagewire.kernels import ops
from pagewire.kernels.data.drawing import Draw
from pagewire.kernels.ops import largest, only_allowed
from pagewire.kernels.reference.drawing import tokens_of, truncated
from pagewire.workers.sample.history import NO_HISTORY, TokenHistory
from pagewire.workers.sample.logit_edits import FLOAT32_MAX, LogitEdits, apply_edits, bounded
from pagewire.workers.sample.logprobs import logprob_rows, logprobs_of
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.token_tables import TABLED
from pagewire.workers.sample.typical import Candidate, accept_typical

__all__ = ["SampleOutput", "SamplingSlot", "logprob_rows", "sample"]

CHUNK = 2**20  # logits processed at a time
PART = 2**24  # logits whose maxima are found at a time

NO_TOKEN_POSSIBLE = (
    "no token can be generated: the grammar, allowed_token_ids, bad_words and min_tokens exclude all of them"
)


def unusable(peak: float) -> str:
    """The error message for a row whose largest logit is not finite."""
    return f"the model returned logits that cannot be sampled: the largest is {peak}"


@dataclass
class SampleOutput:
    """One token per row; by row index, the requested log probabilities and the errors.

    A row with an error has a meaningless token id 0 and no log probabilities. error_types: names of exceptions, for
    errors that are the request's fault.
    """

    token_ids: list[int]
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    error_types: dict[int, str] = field(default_factory=dict)


class Stages(NamedTuple):
    """The stages of sampling that a row needs."""

    edits: bool
    draw: bool


GREEDY = Stages(edits=False, draw=False)


class SamplingSlot:
    """The sampler's state of one sequence while it has a slot.

    params: of the request. seed: of this sequence, taken modulo 2**64. stop_ids: tokens that end it, excluded until
    `min_tokens` are generated. tokens: integers; the first num_tokens are the sequence so far, of which
    num_prompt_tokens are the prompt; the others were generated before a preemption or restart. `NO_TOKEN` in the
    prompt is no token: no penalty applies to it, and it is in no bad word. vocab_size: V.

    candidate: a draft of the next token, which may count without being drawn; only in a state `ahead`.
    with_history: logits processors need the tokens: `history` has them.

    `tokens` is only read in the constructor; no reference is kept.
    A slot that is rebuilt from the same history continues with the same tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        stop_ids: Sequence[int],
        tokens: NDArray[Any],
        num_prompt_tokens: int,
        num_tokens: int,
        vocab_size: int,
        with_history: bool = False,
    ) -> None:
        self.params, self.seed, self.num_tokens = without(params, TABLED), seed, num_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.temperature, self.stop_ids = bounded(params.temperature), frozenset(stop_ids)
        self.candidate: Candidate | None = None
        self.history = NO_HISTORY
        if with_history:
            prompt, output = np.split(tokens[:num_tokens], [num_prompt_tokens])
            self.history = TokenHistory(prompt.tolist(), output.tolist())
        self.edits = LogitEdits(params, stop_ids, tokens, num_prompt_tokens, num_tokens, vocab_size)
        self._truncation = (params.top_k if 0 < params.top_k < vocab_size else 0, params.top_p, params.min_p)

    def append(self, token_id: int) -> None:
        """Update the state with the sequence's next token."""
        self.num_tokens += 1
        self.edits.add(token_id)
        if self.history is not NO_HISTORY:
            self.history.append(token_id)

    def ahead(self, token_ids: Sequence[int], candidate: Candidate | None = None) -> SamplingSlot:
        """The state after these tokens, as a copy; this one does not change.

        candidate: the draft of the token that follows, if it may count without being drawn.
        """
        if not token_ids and candidate is None:
            return self
        state = copy(self)
        state.candidate = candidate
        if token_ids:
            state.edits = self.edits.copy()
            state.history = self.history if self.history is NO_HISTORY else self.history.ahead([])
        for token_id in token_ids:
            state.append(token_id)
        return state

    @property
    def is_plain(self) -> bool:
        """True if nothing but tokens is asked for, and changes of logits are those of `LogitEdits.is_countable`."""
        return self.params.logprobs is None and self.history is NO_HISTORY and self.edits.is_countable

    @property
    def draw(self) -> Draw:
        """How the next token is drawn, if it is."""
        return Draw(self.seed, self.num_tokens, self.temperature, *self._truncation)

    @property
    def stages(self) -> Stages:
        """The stages that the next token needs."""
        return Stages(edits=self.edits.active, draw=self.params.temperature > 0)


def sample(
    logits: torch.Tensor, slots: Sequence[SamplingSlot], masks: TokenMasks | None = None
) -> SampleOutput:
    """Sample one token per row of `logits` [R, V], any float dtype, for `slots` [R]. Logits are not changed.

    masks: allowed tokens of rows with a grammar.

    Never raises because of logits: a row that cannot be sampled gets an error, the others get their tokens.
    """
    output = SampleOutput([0] * len(slots))
    if not slots:
        return output
    masks = masks or TokenMasks()
    allowed = masks.of_rows(len(slots))
    if allowed is not None:
        allowed = allowed.to(logits.device)
    peaks, firsts = _largest(logits, allowed)
    groups: dict[tuple[Stages, bool], list[int]] = {}
    for row, (peak, first, slot) in enumerate(zip(peaks.tolist(), firsts.tolist(), slots, strict=True)):
        masked = row in masks
        if math.isfinite(peak):
            if slot.stages == GREEDY:
                output.token_ids[row] = first
            else:
                groups.setdefault((slot.stages, masked), []).append(row)
        elif masked and peak == -math.inf:
            output.errors[row] = NO_TOKEN_POSSIBLE
        else:
            output.errors[row], output.error_types[row] = unusable(peak), NotFiniteError.__name__
    step = max(1, CHUNK // logits.shape[1])
    for (stages, masked), group in groups.items():
        for start in range(0, len(group), step):
            rows = group[start : start + step]
            bits = _take(allowed, rows) if masked and allowed is not None else None
            _sample_rows(_take(logits, rows), _take(peaks, rows), slots, bits, rows, stages, output)
    _add_logprobs(logits, slots, allowed, output)
    return output


def _largest(logits: torch.Tensor, allowed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.ops.largest`, a part of the rows at a time: on a GPU each takes scratch memory."""
    step = max(1, PART // logits.shape[1])
    parts = [
        largest(logits[start : start + step], None if allowed is None else allowed[start : start + step])
        for start in range(0, len(logits), step)
    ]
    return torch.cat([values for values, _ in parts]), torch.cat([columns for _, columns in parts])


def _sample_rows(
    x: torch.Tensor,
    peaks: torch.Tensor,
    slots: Sequence[SamplingSlot],
    allowed: torch.Tensor | None,
    rows: list[int],
    stages: Stages,
    output: SampleOutput,
) -> None:
    """Sample `rows`, which all need `stages`, into `output`.

    x: their logits [n, V]. peaks: maxima of their allowed logits [n]. allowed: their masks.
    """
    chosen = [slots[row] for row in rows]
    if allowed is not None:
        x = only_allowed(x, allowed)
    elif stages.edits:
        x = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if stages.edits:
        apply_edits(x, [slot.edits for slot in chosen])
        peaks, firsts = largest(x)
        empty = (peaks == -math.inf).nonzero()[:, 0]
        x[empty] = peaks[empty] = 0
        for i in empty.tolist():
            output.errors[rows[i]] = NO_TOKEN_POSSIBLE
    token_ids = _draw(x, peaks, chosen) if stages.draw else firsts.tolist()
    for row, token_id in zip(rows, token_ids, strict=True):
        if row not in output.errors:
            output.token_ids[row] = token_id


def _draw(x: torch.Tensor, peaks: torch.Tensor, slots: Sequence[SamplingSlot]) -> list[int]:
    """A random token per row of x [n, V]; peaks: its row maxima [n], finite."""
    draws = [slot.draw for slot in slots]
    candidates = [slot.candidate for slot in slots]
    if not any(candidates):
        return ops.draw(x, peaks, draws)
    found = truncated(x, peaks, draws, ops.fixed_point_probabilities)
    token_ids = tokens_of(found, draws)
    accept_typical(token_ids, candidates, found.depths, found.masses, found.ids)
    return token_ids


def _add_logprobs(
    logits: torch.Tensor, slots: Sequence[SamplingSlot], allowed: torch.Tensor | None, output: SampleOutput
) -> None:
    """Add log probabilities for rows that request them and have no error: of raw logits, or of processed ones.

    allowed: as `kernels.ops.only_allowed` takes it; None: all tokens are.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    for row, slot in enumerate(slots):
        if slot.params.logprobs is not None and row not in output.errors:
            groups.setdefault((slot.params.logprobs, slot.params.processed_logprobs), []).append(row)
    for (k, is_processed), rows in groups.items():
        x = _take(logits, rows)
        if is_processed:
            x = _processed(x, [slots[row] for row in rows], None if allowed is None else _take(allowed, rows))
        logprobs = logprobs_of(x, [output.token_ids[row] for row in rows], k)
        output.logprobs.update(zip(rows, logprobs.rows(), strict=True))


def _processed(x: torch.Tensor, slots: Sequence[SamplingSlot], allowed: torch.Tensor | None) -> torch.Tensor:
    """Logits [n, V] after all edits and at the temperature, as a copy; those of greedy rows are not divided.

    Nor are those of rows with timestamps: by their log probabilities, decodings at other temperatures are compared.
    """
    x = x.to(torch.float32, copy=True) if allowed is None else only_allowed(x, allowed)
    apply_edits(x, [slot.edits for slot in slots])
    divided = [slot.params.temperature > 0 and slot.params.timestamps is None for slot in slots]
    divisors = [slot.temperature if divides else 1.0 for slot, divides in zip(slots, divided, strict=True)]
    # Peaks are subtracted first, and no possible token becomes impossible: temperatures may be tiny.
    scaled = (x - x.amax(1, keepdim=True)) / torch.tensor(divisors, device=x.device)[:, None]
    return scaled.clamp_min(-FLOAT32_MAX / 2).masked_fill(x == -math.inf, -math.inf)


def _take(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows of x (ascending indices); a view if they are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return x[rows[0] : rows[-1] + 1]
    return x[torch.tensor(rows, device=x.device)]
