"""How a router chooses the experts of a token, as plain numbers."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts in groups of equal size, those of a group one after the other: only the best groups are chosen from.

    A group is as good as the sum of what its best experts are chosen by.
    """

    count: int
    kept: int
    """The number of groups that are chosen from."""
    best: int = 1
    """The number of experts in that sum: 1 or 2."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router makes of a token's logits: the experts that it chooses, and their weights.

    All of it is float32. An expert's score is its share of the softmax of all logits, or the sigmoid of its own.
    It is chosen by its score, to which the router may add a bias (`Router.bias`) that its weight is without.
    """

    num_chosen: int
    normalised: bool
    """The weights of the chosen experts are their scores divided by the sum of these; else they are the scores."""
    dtype: torch.dtype
    """The weights are rounded to it in the end."""
    sigmoid: bool = False
    """Scores are sigmoids of logits; else their softmax."""
    groups: ExpertGroups | None = None
    epsilon: float = 0.0
    """Added to the sum that scores are divided by."""
    factor: float = 1.0
    """Weights are multiplied by it."""
    margin: float = 0.0
    """Above 0: the score of a chosen expert is its share of the softmax of only those logits of experts not chosen
    before it that lie below its own by no more than this part of the larger of it and their own size (PhiMoE)."""
    by_logits: bool = False
    """An expert is chosen by its logit, with the bias, and not by its score (Kolibri)."""

    def check(self, num_experts: int) -> None:
        """Refuse what cannot be chosen from this many experts.

        Raises:
            ValueError: there are too few of them, or they are not groups of equal size.
        """
        count, kept = (1, 1) if self.groups is None else (self.groups.count, self.groups.kept)
        size, rest = divmod(num_experts, count)
        if rest or not 0 < kept <= count or not 0 < self.num_chosen <= kept * size:
            raise ValueError(
                f"{self.num_chosen} of {num_experts} experts cannot be chosen, from {kept} of {count} groups"
            )
