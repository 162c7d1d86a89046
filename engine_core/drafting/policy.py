"""How many drafts pay: the number that makes the sequences of a step fastest, which may be none.

A row with drafts gives as many more tokens as are right, and every row of the step waits for them. Both are
weighed by proportional fairness (Kelly 1997): drafts pay if the factors by which rows become faster, as
logarithms, are in the mean over that by which the step becomes slower. Times of steps are measured; how likely
a draft is right follows from its source and from what the request's drafts have been worth (`acceptance`).
Steps with drafts cannot be planned one ahead, and what that costs is in their time as it is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Protocol

from pagewire.engine_core.drafting.costs import StepCosts

MARGIN = 0.02  # by which, as a logarithm, drafts must be better than none
LEAST_REACH = 0.02  # a draft that is less likely right is not considered
CERTAIN = 0.98  # a draft of the best kind, to see whether any could pay
WEIGHT_OF_WAIT = 0.1  # of a new measurement
PROBE_INTERVAL = 256  # decisions against drafts after which some are tried all the same
PROBE_REACH = 0.25  # if they are as likely as this
PROBE_DRAFTS = 8
SMALL = 8  # drafts of a step that are tried without a measurement; then twice as many as were measured


class LengthPolicy(Protocol):
    """Decides how many drafts a step verifies."""

    def lengths(self, num_rows: int, reaches: Sequence[list[float]], room: int) -> list[int]:
        """For each of several drafts, how many of its tokens to verify.

        num_rows: sequences that sample in the step, with drafts or without. reaches: for each draft and token, how
            likely it and those before it are right, descending. room: tokens that the step can take in addition.
        """

    def hopeless(self, num_rows: int, room: int) -> bool:
        """True if no draft whatever would pay in a step of `num_rows` rows."""

    def observe(self, num_tokens: int, seconds: float, waited: float, *, drafted: bool) -> None:
        """Take in the time of a step that sampled `num_tokens`, with drafts among them or without.

        waited: seconds for which the worker had nothing to do before it.
        """

    def seconds(self, num_tokens: int) -> float:
        """The time of a step without drafts; 0 if that is not known yet."""


class MeasuredPolicy:
    """The policy of an engine.

    Attributes:
        plain, drafted: costs of steps without drafts and with drafts. A number of rows has no drafts before a step
            of as many was measured without them.
    """

    def __init__(self) -> None:
        self.plain, self.drafted = StepCosts(), StepCosts()
        self._num_refused = 0
        self._waits = {False: 0.0, True: 0.0}  # mean seconds before a step, by whether it has drafts

    def lengths(self, num_rows: int, reaches: Sequence[list[float]], room: int) -> list[int]:
        """The numbers that make the rows fastest; now and then some although none seem to pay."""
        lengths = [0] * len(reaches)
        room = min(room, self._most_tried(num_rows))
        if not num_rows or not self.plain.measured(num_rows) or room <= 0:
            return lengths
        ranked = sorted((gain for i, draft in enumerate(reaches) for gain in gains(draft, i)), reverse=True)
        del ranked[room:]
        count = self._best(num_rows, [gain for gain, _, _ in ranked])
        if count == 0 and self._refused():
            count = sum(reach >= PROBE_REACH for _, reach, _ in ranked[:PROBE_DRAFTS])
            if count == 0:
                self._num_refused = 0
        for _, _, i in ranked[:count]:
            lengths[i] += 1
        return lengths

    def hopeless(self, num_rows: int, room: int) -> bool:
        """True if even certain drafts would not pay. What was measured long ago does not count for ever."""
        if not self.plain.measured(num_rows):
            return True
        room = min(room, self._most_tried(num_rows))
        each = 1
        while each * num_rows <= room:
            if log(1 + CERTAIN * each) > self._slowdown(num_rows, each * num_rows) + MARGIN:
                return False
            each *= 2
        alone = min(room, SMALL)
        if alone > 0 and log(1 + CERTAIN * alone) > num_rows * (self._slowdown(num_rows, alone) + MARGIN):
            return False
        return not self._refused()

    def observe(self, num_tokens: int, seconds: float, waited: float, *, drafted: bool) -> None:
        """Take in the time of a step."""
        (self.drafted if drafted else self.plain).observe(num_tokens, seconds)
        self._waits[drafted] += WEIGHT_OF_WAIT * (waited - self._waits[drafted])
        if drafted:
            self._num_refused = 0

    def seconds(self, num_tokens: int) -> float:
        """The time of a step without drafts, and of the wait before it; 0 if that is not known yet."""
        return self.plain.seconds(num_tokens) + self._waits[False] if self.plain.known else 0.0

    def _best(self, num_rows: int, ranked: list[float]) -> int:
        """How many of the most useful drafts make the rows fastest; 0 if none. ranked: what each gains."""
        best, count, total = 0.0, 0, 0.0
        for number, gain in enumerate(ranked, 1):
            total += gain
            if number > 16 and number % 8 and number < len(ranked):
                continue
            value = total - num_rows * (self._slowdown(num_rows, number) + MARGIN)
            if value > best:
                best, count = value, number
        return count

    def _slowdown(self, num_rows: int, num_drafts: int) -> float:
        """By which factor drafts make a step longer, as a logarithm.

        Below the smallest step with drafts that was measured, their time lies on a line from that without.
        """
        plain, size = self.plain.seconds(num_rows), num_rows + num_drafts
        if not self.drafted.known:
            seconds = self.plain.seconds(size)
        elif size >= (first := self.drafted.smallest) or first <= num_rows:
            seconds = self.drafted.seconds(size)
        else:
            seconds = plain + (self.drafted.seconds(first) - plain) * num_drafts / (first - num_rows)
        return log((seconds + self._waits[True]) / (plain + self._waits[False]))

    def _most_tried(self, num_rows: int) -> int:
        """The most drafts of a step: a few, then twice as many as there were before."""
        return max(SMALL, num_rows, 2 * int(self.drafted.largest) if self.drafted.known else 0)

    def _refused(self) -> bool:
        """Count a decision against drafts; True if it is time to try some again."""
        self._num_refused += 1
        return self._num_refused > PROBE_INTERVAL


def gains(reaches: list[float], number: int) -> list[tuple[float, float, int]]:
    """For each token of draft `number`: the logarithm of the factor for its row, its reach, `number`.

    The factors descend, so the best tokens of several drafts are the first of each.
    """
    tokens, found = 1.0, []
    for reach in reaches:
        if reach < LEAST_REACH:
            break
        found.append((log(1 + reach / tokens), reach, number))
        tokens += reach
    return found
