"""How many drafts pay: the number that makes the sequences of a step fastest, which may be none.

A row with drafts gives as many more tokens as are right, and every row of the step waits for them. Both are
weighed by proportional fairness (Kelly 1997): drafts pay if the factors by which rows become faster, as
logarithms, are in the mean over that by which the step becomes slower. Times of steps are measured; how likely
a draft is right follows from its source and from what the request's drafts have been worth (`acceptance`).
Steps with drafts cannot be planned one ahead, and what that costs is in their time as it is measured.

Measurements are wrong at times, so none forbids the first `NUM_TRIALS` steps with drafts that are likely right: by
then every outlier among them is one of several. And whether drafts have paid is measured in turn (`payoff`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Protocol

from pagewire.engine_core.drafting.costs import MeasuredStep, WaitCosts
from pagewire.engine_core.drafting.payoff import Payoff
from pagewire.engine_core.schedule.step_costs import StepCosts, size_class

MARGIN = 0.02  # by which, as a logarithm, drafts must be better than none
LEAST_REACH = 0.02  # a draft that is less likely right is not considered
CERTAIN = 0.98  # a draft of the best kind, to see whether any could pay
NUM_TRIALS = 8  # steps that verify drafts whatever was measured: enough for the least of a few of one size
ONLY_ASKED = 1 / 8  # of a trial: a step that only asks for drafts, so that those end that are never verified
PROBE_INTERVAL = 256  # later decisions against drafts after which some are tried all the same
PROBE_REACH = 0.25  # if they are as likely as this
PROBE_DRAFTS = 4
PLAIN_INTERVAL = 128  # steps with drafts in succession after which one has none, so that its time is known
REFRESH = 8  # steps after which what follows from their times is computed again
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

    def observe(self, step: MeasuredStep) -> None:
        """Take in what a step took."""

    def seconds(self, num_rows: int) -> float:
        """The time of a step of `num_rows` rows without drafts; 0 if that is not known yet."""


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
        self._num_in_succession = 0  # steps with drafts
        self._num_observed = 0
        self._wasted = 0.0  # seconds that the worker has waited for steps that then had no drafts
        self._payoffs: dict[int, Payoff] = {}  # by `size_class` of the number of rows
        self._slowdowns: dict[tuple[int, int], float] = {}
        self._waits = {False: WaitCosts(), True: WaitCosts()}  # before a step, by whether it has drafts

    def lengths(self, num_rows: int, reaches: Sequence[list[float]], room: int) -> list[int]:
        """The numbers that make the rows fastest; at first, and now and then, some although none seem to pay."""
        lengths = [0] * len(reaches)
        room = min(room, self._most_tried(num_rows))
        if room <= 0 or not self._allowed(num_rows):
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
        if not self._allowed(num_rows):
            return True
        room = min(room, self._most_tried(num_rows))
        if self._trying and room > 0:
            return False
        each, margin = 1, self._margin(num_rows)
        while each * num_rows <= room:
            if log(1 + CERTAIN * each) > self._slowdown(num_rows, each * num_rows) + margin:
                return False
            each *= 2
        alone = min(room, SMALL)
        if alone > 0 and log(1 + CERTAIN * alone) > num_rows * (self._slowdown(num_rows, alone) + margin):
            return False
        return not self._refused()

    def observe(self, step: MeasuredStep) -> None:
        """Take in what a step took. A wait in vain counts for the next step with drafts."""
        if step.drafted:
            self._num_refused = 0
            self._num_in_succession += 1
            self._num_trials += 1 if step.verified else ONLY_ASKED
            waited, self._wasted = step.idle + self._wasted, 0.0
        else:
            self._num_in_succession = 0
            waited = 0.0 if step.late else step.idle
            self._wasted += step.idle - waited
        costs, wait = (self.drafted if step.drafted else self.plain), self._waits[step.drafted]
        costs.observe(step.num_samples, step.busy)
        wait.observe(step.num_rows, waited)
        if not self._trying and self.plain.settled(step.num_rows):
            self._take_payoff(step, costs.seconds(step.num_samples))
        self._num_observed += 1
        if self._trying or self._num_observed % REFRESH == 0:
            self._slowdowns.clear()

    def _take_payoff(self, step: MeasuredStep, expected: float) -> None:
        """Take in what a step gave. expected: the seconds of such a step without the wait before it."""
        payoff = self._payoffs.setdefault(size_class(step.num_rows), Payoff())
        at_best = self.seconds(step.num_rows) * step.num_tokens / step.num_rows
        if step.drafted or step.late:
            payoff.take_with(
                step.busy + step.idle, expected + self._waits[True].seconds(step.num_rows), at_best
            )
        else:
            payoff.take_without(step.busy + step.idle, at_best)

    def seconds(self, num_rows: int) -> float:
        """The time of a step without drafts, and of the wait before it; 0 if that is not known yet."""
        return (
            self.plain.seconds(num_rows) + self._waits[False].seconds(num_rows) if self.plain.known else 0.0
        )

    def _best(self, num_rows: int, ranked: list[float]) -> int:
        """How many of the most useful drafts make the rows fastest; 0 if none. ranked: what each gains."""
        best, count, total, margin = 0.0, 0, 0.0, self._margin(num_rows)
        for number, gain in enumerate(ranked, 1):
            total += gain
            if number != size_class(number) and number < len(ranked):
                continue
            value = total - num_rows * (self._slowdown(num_rows, number) + margin)
            if value > best:
                best, count = value, number
        return count

    def _allowed(self, num_rows: int) -> bool:
        """True if a step without drafts is known, and it is not time for another one."""
        return self.plain.settled(num_rows) and self._num_in_succession < PLAIN_INTERVAL

    def _margin(self, num_rows: int) -> float:
        """By which, as a logarithm, drafts must be better than none."""
        payoff = self._payoffs.get(size_class(num_rows))
        return MARGIN if payoff is None else MARGIN + payoff.penalty

    def _slowdown(self, num_rows: int, num_drafts: int) -> float:
        """By which factor drafts make a step longer, as a logarithm; as it was at most `REFRESH` steps ago."""
        slowdown = self._slowdowns.get((num_rows, num_drafts))
        if slowdown is None:
            slowdown = self._slowdowns[num_rows, num_drafts] = self._compute_slowdown(num_rows, num_drafts)
        return slowdown

    def _compute_slowdown(self, num_rows: int, num_drafts: int) -> float:
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
        waited = {drafted: wait.seconds(num_rows) for drafted, wait in self._waits.items()}
        return log((seconds + waited[True]) / (plain + waited[False]))

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
