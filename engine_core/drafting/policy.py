"""How many drafts pay: the number that gives the most tokens in a second, which may be none.

A step of R rows gives R tokens. With drafts it gives as many more as are right, in the time of a larger step. Both
times are measured; how likely a draft is right follows from its source and from what the request's drafts have been
worth (`acceptance`). Steps with drafts cannot be planned one ahead, and what that costs is in their time as it is
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagewire.engine_core.drafting.costs import StepCosts

MARGIN = 1.03  # by this factor drafts must be better than none
LEAST_REACH = 0.02  # a draft that is less likely right is not considered
CERTAIN = 0.98  # a draft of the best kind, to see whether any could pay
PROBE_INTERVAL = 256  # decisions against drafts after which some are tried all the same
PROBE_REACH = 0.25  # if they are as likely as this
PROBE_DRAFTS = 8


class LengthPolicy(Protocol):
    """Decides how many drafts a step verifies."""

    def lengths(self, num_rows: int, reaches: Sequence[list[float]], room: int) -> list[int]:
        """For each of several drafts, how many of its tokens to verify.

        num_rows: sequences that sample in the step, with drafts or without. reaches: for each draft and token, how
            likely it and those before it are right, descending. room: tokens that the step can take in addition.
        """

    def hopeless(self, num_rows: int, room: int) -> bool:
        """True if no draft whatever would pay in a step of `num_rows` rows."""

    def observe(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Take in the time of a step that sampled `num_tokens`, with drafts among them or without."""

    def seconds(self, num_tokens: int) -> float:
        """The time of a step without drafts; 0 if that is not known yet."""


class MeasuredPolicy:
    """The policy of an engine.

    Attributes:
        plain, drafted: costs of steps without drafts and with drafts.
    """

    def __init__(self) -> None:
        self.plain, self.drafted = StepCosts(), StepCosts()
        self._num_refused = 0

    def lengths(self, num_rows: int, reaches: Sequence[list[float]], room: int) -> list[int]:
        """The numbers that give the most tokens in a second; now and then some although none seem to pay."""
        ranked = sorted(
            ((reach, i) for i, draft in enumerate(reaches) for reach in draft if reach >= LEAST_REACH),
            reverse=True,
        )[: max(0, room)]
        count = self._best(num_rows, [reach for reach, _ in ranked])
        if count == 0 and self._refused():
            count = sum(reach >= PROBE_REACH for reach, _ in ranked[:PROBE_DRAFTS])
            if count == 0:
                self._num_refused = 0
        lengths = [0] * len(reaches)
        for _, i in ranked[:count]:
            lengths[i] += 1
        return lengths

    def hopeless(self, num_rows: int, room: int) -> bool:
        """True if even certain drafts would not pay. What was measured long ago does not count for ever."""
        if not self.plain.known:
            return True
        least, number = self._least_rate(num_rows), 1
        while number <= room:
            if (num_rows + CERTAIN * number) / self._seconds(num_rows + number) > least:
                return False
            number *= 2
        return not self._refused()

    def observe(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Take in the time of a step."""
        (self.drafted if drafted else self.plain).observe(num_tokens, seconds)
        if drafted:
            self._num_refused = 0

    def seconds(self, num_tokens: int) -> float:
        """The time of a step without drafts; 0 if that is not known yet."""
        return self.plain.seconds(num_tokens) if self.plain.known else 0.0

    def _best(self, num_rows: int, reaches: list[float]) -> int:
        """How many of the likeliest drafts give the most tokens in a second; 0 if none."""
        if not num_rows or not self.plain.known:
            return 0
        best, count = self._least_rate(num_rows), 0
        num_tokens = float(num_rows)
        for number, reach in enumerate(reaches, 1):
            num_tokens += reach
            if number > 16 and number % 8 and number < len(reaches):
                continue
            rate = num_tokens / self._seconds(num_rows + number)
            if rate > best:
                best, count = rate, number
        return count

    def _least_rate(self, num_rows: int) -> float:
        """The tokens in a second that drafts must give to be better than none."""
        return MARGIN * num_rows / self.plain.seconds(num_rows)

    def _seconds(self, num_tokens: int) -> float:
        """The time of a step with drafts; before there was one, that of a step with as many rows."""
        return (self.drafted if self.drafted.known else self.plain).seconds(num_tokens)

    def _refused(self) -> bool:
        """Count a decision against drafts; True if there were so many that it is time to try some."""
        self._num_refused += 1
        return self._num_refused > PROBE_INTERVAL
