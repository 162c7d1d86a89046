"""What is measured of steps and of the waits before them, by which drafts are found to pay or not."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.engine_core.schedule.step_costs import FIRST_FEW, WEIGHT, WEIGHT_OF_SLOW, size_class


@dataclass(slots=True)
class MeasuredStep:
    """What is known of a step that has returned and computed no prompt.

    num_rows: rows that sampled. num_samples: of all of them. num_tokens: that they gave. busy: its seconds.
    idle: seconds for which the worker had nothing to do before it. late: none was in flight when it was planned.
    drafted: it verified drafts, or its worker proposed some. verified: it verified some.
    """

    num_rows: int
    num_samples: int
    num_tokens: int
    busy: float
    idle: float
    late: bool
    drafted: bool
    verified: bool


@dataclass(slots=True)
class WaitCost:
    """The seconds of waits of one kind."""

    seconds: float = 0.0
    num_measured: int = 0

    def observe(self, seconds: float) -> None:
        """Take in a wait."""
        self.num_measured += 1
        if self.num_measured <= FIRST_FEW:
            self.seconds = seconds if self.num_measured == 1 else min(seconds, self.seconds)
        else:
            weight = WEIGHT if seconds < self.seconds else WEIGHT_OF_SLOW
            self.seconds += weight * (seconds - self.seconds)


class WaitCosts:
    """The seconds for which a worker has nothing to do before steps of one kind, by their number of rows."""

    def __init__(self) -> None:
        self._all = WaitCost()
        self._classes: dict[int, WaitCost] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Take in the wait before a step."""
        self._all.observe(seconds)
        self._classes.setdefault(size_class(num_rows), WaitCost()).observe(seconds)

    def seconds(self, num_rows: int) -> float:
        """The wait before a step; before a few of about its size were measured, that before any step."""
        cost = self._classes.get(size_class(num_rows), self._all)
        return (cost if cost.num_measured >= FIRST_FEW else self._all).seconds
