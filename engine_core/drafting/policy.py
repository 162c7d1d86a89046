"""How many drafts pay: the number that makes the sequences of a step fastest, which may be none.

A row with drafts gives as many more tokens as are right, and every row of the step waits for them. Both are
weighed by proportional fairness (Kelly 1997): drafts pay if the factors by which rows become faster, as
logarithms, are in the mean over that by which the step becomes slower. Times of steps are measured; how likely
a draft is right follows from its source and from what the request's drafts have been worth (`acceptance`).
Steps with drafts cannot be planned one ahead, and what that costs is in their time as it is measured.

Measurements are wrong at times, so none forbids the first `NUM_TRIALS` steps with drafts that are likely right: by
then every outlier among them is one of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Protocol

from pagewire.engine_core.drafting.costs import StepCosts, WaitCost

MARGIN = 0.02  # by which, as a logarithm, drafts must be better than none
LEAST_REACH = 0.02  # a draft that is less likely right is not considered
CERTAIN = 0.98  # a draft of the best kind, to see whether any could pay
NUM_TRIALS = 8  # steps that verify drafts whatever was measured: enough for the least of a few of one size
ONLY_ASKED = 1 / 8  # of a trial: a step that only asks for drafts, so that those end that are never verified
PROBE_INTERVAL = 256  # later decisions against drafts after which some are tried all the same
PROBE_REACH = 0.25  # if they are as likely as this
PROBE_DRAFTS = 4
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

    def observe(
        self, num_tokens: int, seconds: float, waited: float, *, drafted: bool, verified: bool
    ) -> None:
        """Take in the time of a step that sampled `num_tokens`.

        waited: seconds for which the worker had nothing to do before it. drafted: it verified drafts, or its worker
            proposed some. verified: it verified some.
        """

    def seconds(self, num_tokens: int) -> float:
        """The time of a step without drafts; 0 if that is not known yet."""


class MeasuredPolicy:
    """The policy of an engine.

    Attributes:
        plain, drafted: costs of steps without drafts and with drafts. A number of rows has no drafts before a few
            steps of as many were measured without them.
    """

    def __init__(self) -> None:
        self.plain, self.drafted = StepCosts(), StepCosts()
        self._num_refused = 0
        self._num_trials = 0.0
        self._waits = {False: WaitCost(), True: WaitCost()}  # before a step, by whether it has drafts

    def lengths(self, num_rows: int, reaches: Sequence[list[float]], room: int) -> list[int]:
        """The numbers that make the rows fastest; at first, and now and then, some although none seem to pay."""
        lengths = [0] * len(reaches)
        room = min(room, self._most_tried(num_rows))
        if not num_rows or not self.plain.settled(num_rows) or room <= 0:
            return lengths
        ranked = sorted((gain for i, draft in enumerate(reaches) for gain in gains(draft, i)), reverse=True)
        del ranked[room:]
        count = self._best(num_rows, [gain for gain, _, _ in ranked])
        if count == 0 and (self._trying or self._refused()):
            count = sum(reach >= PROBE_REACH for _, reach, _ in ranked[:PROBE_DRAFTS])
            if count == 0:
                self._num_refused = 0
        for _, _, i in ranked[:count]:
            lengths[i] += 1
        return lengths

    def hopeless(self, num_rows: int, room: int) -> bool:
        """True if even certain drafts would not pay. What was measured long ago does not count for ever."""
        if not self.plain.settled(num_rows):
            return True
        room = min(room, self._most_tried(num_rows))
        if self._trying and room > 0:
            return False
        each = 1
        while each * num_rows <= room:
            if log(1 + CERTAIN * each) > self._slowdown(num_rows, each * num_rows) + MARGIN:
                return False
            each *= 2
        alone = min(room, SMALL)
        if alone > 0 and log(1 + CERTAIN * alone) > num_rows * (self._slowdown(num_rows, alone) + MARGIN):
            return False
        return not self._refused()

    def observe(
        self, num_tokens: int, seconds: float, waited: float, *, drafted: bool, verified: bool
    ) -> None:
        """Take in the time of a step."""
        (self.drafted if drafted else self.plain).observe(num_tokens, seconds)
        self._waits[drafted].observe(waited)
        if drafted:
            self._num_refused = 0
            self._num_trials += 1 if verified else ONLY_ASKED

    def seconds(self, num_tokens: int) -> float:
        """The time of a step without drafts, and of the wait before it; 0 if that is not known yet."""
        return self.plain.seconds(num_tokens) + self._waits[False].seconds if self.plain.known else 0.0

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

        Outside the sizes of steps with drafts that count, their time lies on the line from that without drafts
        through the nearest of them; above no more rows than now, it is as much above that without as theirs is.
        """
        plain, size = self.plain.seconds(num_rows), num_rows + num_drafts
        seconds = self.plain.seconds(size)
        if self.drafted.known:
            near = min(max(size, self.drafted.smallest), self.drafted.largest)
            measured = self.drafted.seconds(near)
            if near == size:
                seconds = measured
            elif near > num_rows:
                on_line = plain + (measured - plain) * num_drafts / (near - num_rows)
                seconds = on_line if near > size else max(on_line, measured)
            else:
                seconds *= measured / self.plain.seconds(near)
        return log((seconds + self._waits[True].seconds) / (plain + self._waits[False].seconds))

    def _most_tried(self, num_rows: int) -> int:
        """The most drafts of a step: a few, then twice as many as there were before."""
        return max(SMALL, num_rows, 2 * int(self.drafted.largest) if self.drafted.known else 0)

    @property
    def _trying(self) -> bool:
        """True during the first steps with drafts."""
        return self._num_trials < NUM_TRIALS

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
