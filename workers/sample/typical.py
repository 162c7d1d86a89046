"""Typical acceptance: a draft may count although another token was drawn in its place.

A draft t counts if p(t) >= min(threshold, alpha * exp(-H)), where p is the distribution that the token was drawn
from (after penalties, grammar, temperature and truncation) and H its entropy in nats: where the model is sure, a
draft must be likely, and where it is not, less will do (Cai et al. 2024, "Medusa", section 2.3.1). A draft that is
the drawn token counts in any case, as without the rule. At temperature 0 p is 1 for the likeliest token and 0 for
the others, so the rule accepts that token alone, and greedy outputs do not depend on drafts.

A token's probability is its mass of the total (`kernels/reference/drawing.py`). With d as the mean depth of a token
below the likeliest one, exp(-H) is exp(-d) / total, so the rule needs no logarithm: mass >= min(threshold * total,
alpha * exp(-d)), where exp is that of masses. Sums are of integers and each other operation is rounded once, so
what is accepted depends on the row alone, and the GPU's kernel (`sampling.cu`) accepts the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.kernels import ops

DEEPEST = 64.0  # depths beyond about 30 have mass 0; infinite ones would give inf * 0


@dataclass(frozen=True)
class TypicalAcceptance:
    """The thresholds of the rule. threshold: a probability. alpha: a factor of exp(-H)."""

    threshold: float
    alpha: float

    @classmethod
    def of(cls, config: SpeculativeConfig | None) -> TypicalAcceptance | None:
        """The rule that a configuration names; None: a draft counts only if it is drawn."""
        if config is None or config.acceptance_method != "typical_acceptance_sampler":
            return None
        return cls(config.posterior_threshold, config.posterior_alpha)

    def accepts(self, mass: int, total: int, at_mean: int) -> bool:
        """True if a token of this mass counts. One that is impossible never does.

        total: of all masses. at_mean: the mass of a token at their mean depth.
        """
        return mass > 0 and mass >= min(self.threshold * total, self.alpha * at_mean)


class Candidate(NamedTuple):
    """A draft that takes the place of the drawn token if the rule accepts it."""

    token_id: int
    rule: TypicalAcceptance


def accept_typical(
    token_ids: list[int],
    candidates: Sequence[Candidate | None],
    depths: torch.Tensor,
    masses: torch.Tensor,
    ids: NDArray[np.int64] | None,
) -> None:
    """Put accepted drafts in the place of drawn tokens.

    token_ids: the drawn token of each row [n], changed in place. candidates: [n]. depths: float32 [n, V].
    masses: int64 [n, V], 0 for tokens that truncation has removed. ids: the token of each column [n, V], ascending;
    None: the column itself.
    """
    rows, columns = [], []
    for row, candidate in enumerate(candidates):
        if candidate is None or candidate.token_id == token_ids[row]:
            continue
        column = column_of(candidate.token_id, masses.shape[1], None if ids is None else ids[row])
        if column is not None:
            rows.append(row)
            columns.append(column)
    if not rows:
        return
    here = masses[rows]
    chosen = here.gather(1, torch.tensor(columns, device=here.device)[:, None])[:, 0].tolist()
    totals = here.sum(1)
    weighted = (depths[rows].clamp_(max=DEEPEST) * here.float()).long().sum(1)
    at_mean = ops.fixed_point_probabilities((weighted.float() / totals.float())[:, None])[:, 0].tolist()
    for row, mass, total, middle in zip(rows, chosen, totals.tolist(), at_mean, strict=True):
        candidate = candidates[row]
        assert candidate is not None
        if candidate.rule.accepts(mass, total, middle):
            token_ids[row] = candidate.token_id


def column_of(token_id: int, num_columns: int, ids: NDArray[np.int64] | None) -> int | None:
    """The column of a token; None if it has none. ids: as in `accept_typical`, of one row."""
    if ids is None:
        return token_id if 0 <= token_id < num_columns else None
    column = int(np.searchsorted(ids, token_id))
    return column if column < len(ids) and ids[column] == token_id else None
