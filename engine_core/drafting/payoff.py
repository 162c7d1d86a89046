"""Whether drafts have paid: what steps with drafts and those that waited for some took, for what they gave.

`policy` predicts from the least that steps have taken. Here sums are compared, so that all counts which a
prediction may miss: waits in vain, drafts that were overrated, what others on the machine do meanwhile. Where
drafts have not paid, they must seem to be better by a penalty, which is doubled as long as they do not, and halved
when they do and as time passes. So drafts that promise much are tried at once, those that just seem to pay are not.
"""

from __future__ import annotations

from dataclasses import dataclass

STRETCH = 16  # steps with drafts, or late for some, that are judged together
FIRST_PENALTY = 0.1  # as a logarithm: drafts must seem to make rows a tenth faster
MOST_PENALTY = 0.8  # what seems to be better than this is tried all the same
RECOVERY = 256  # other steps after which a penalty is halved
MEMORY = 0.98  # weight of the past with each further step: about 50 steps count
MOST_AT_ONCE = 2.0  # a step counts as at most this many times what is expected of it


@dataclass(slots=True)
class Balance:
    """The seconds of steps, and those that their tokens would take in steps without drafts at their best."""

    seconds: float = 0.0
    at_best: float = 0.0

    @property
    def slowness(self) -> float:
        """How many times longer than at best a token took; 1 without any step."""
        return self.seconds / self.at_best if self.at_best else 1.0


class Payoff:
    """The penalty of drafts in steps of about one number of rows."""

    def __init__(self) -> None:
        self.penalty = 0.0
        self._with, self._without = Balance(), Balance()
        self._num_with = self._num_without = 0

    def take_without(self, seconds: float, at_best: float) -> None:
        """Take in a step that neither had drafts nor waited for any."""
        other = self._without
        other.seconds = other.seconds * MEMORY + min(seconds, MOST_AT_ONCE * at_best)
        other.at_best = other.at_best * MEMORY + at_best
        self._num_without += 1
        if self._num_without == RECOVERY:
            self._lower()

    def take_with(self, seconds: float, expected: float, at_best: float) -> None:
        """Take in a step that had drafts, or waited in vain. expected: the seconds that such a step takes."""
        self._with.seconds += min(seconds, MOST_AT_ONCE * expected)
        self._with.at_best += at_best
        self._num_with += 1
        if self._num_with < STRETCH:
            return
        if self._with.slowness < self._without.slowness:
            self._lower()
        else:
            self.penalty = min(MOST_PENALTY, max(FIRST_PENALTY, 2 * self.penalty))
        self._with, self._num_with, self._num_without = Balance(), 0, 0

    def _lower(self) -> None:
        self.penalty = self.penalty / 2 if self.penalty > FIRST_PENALTY else 0.0
        self._num_without = 0
