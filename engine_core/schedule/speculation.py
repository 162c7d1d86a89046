"""What the scheduler asks about drafts: which rows carry some, and whether the next step waits for this one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.step import PlannedStep
from pagewire.ipc.wire.steps import Row, RowResult, StepResult


@dataclass
class SpeculationStats:
    """Counts since the core started.

    num_rows: verified rows with drafts. num_emitted: tokens that they gave, also behind the drafts.
    drafted_at, accepted_at: by position in the draft.
    num_steps, num_tokens, seconds: the rows of steps that computed no prompt, with drafts or without, the tokens
        that they gave, and the time of the steps. seconds_without: the time that these tokens would have taken
        without drafts, by that of steps without them.
    """

    num_rows: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    seconds_without: float = 0.0

    def verified(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """Count a row that gave `num_tokens` tokens; the first `num_accepted` were drafts."""
        while len(self.drafted_at) < num_drafts:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for place in range(num_drafts):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < num_accepted
        self.num_rows += 1
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        self.num_emitted += num_tokens

    def ran(self, num_rows: int, num_tokens: int, seconds: float, seconds_without: float) -> None:
        """Count a step of `num_rows` rows, with drafts or not."""
        self.num_steps += num_rows
        self.num_tokens += num_tokens
        self.seconds += seconds
        self.seconds_without += seconds_without

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the verified drafts that were right."""
        return self.num_accepted / max(1, self.num_drafts)

    @property
    def efficiency(self) -> float:
        """Fraction of the tokens that rows with drafts could have given that they gave."""
        return self.num_emitted / max(1, self.num_drafts + self.num_rows)


class Speculation(Protocol):
    """What the scheduler asks about drafts. drafts: rows may carry some; False: none ever does.

    stats: what they have done.
    """

    drafts: bool
    stats: SpeculationStats

    def waits(self, step: PlannedStep, running: Collection[Sequence], num_waiting: int) -> bool:
        """True if no step may be planned while `step` is in flight."""

    def choose(
        self, running: Collection[Sequence], num_waiting: int, budget: int, *, ahead: bool
    ) -> dict[Sequence, list[int]]:
        """The drafts of the next step.

        running: those that it may run. num_waiting: all others. ahead: another step is in flight; so there are
        none, but for those of a pipeline.
        """

    def num_asked(self, sequence: Sequence) -> int:
        """How many drafts the worker is asked for, to follow the next row of a sequence."""

    def take(self, sequence: Sequence, row: Row, result: RowResult, num_tokens: int) -> int:
        """Learn from a row's tokens; the sequence took the first `num_tokens`. Returns how many were drafts."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what a sequence's worker has proposed: the sequence was preempted, or the worker is lost."""

    def end(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended."""

    def measure(self, step: PlannedStep, result: StepResult, *, goes_on: bool) -> None:
        """Take in what a step took. goes_on: sequences run after it."""


class NoSpeculation:
    """No drafts."""

    drafts = False

    def __init__(self) -> None:
        self.stats = SpeculationStats()

    def waits(self, step: PlannedStep, running: Collection[Sequence], num_waiting: int) -> bool:
        """Never."""
        return False

    def choose(
        self, running: Collection[Sequence], num_waiting: int, budget: int, *, ahead: bool
    ) -> dict[Sequence, list[int]]:
        """None."""
        return {}

    def num_asked(self, sequence: Sequence) -> int:
        """None."""
        return 0

    def take(self, sequence: Sequence, row: Row, result: RowResult, num_tokens: int) -> int:
        """None."""
        return 0

    def forget(self, sequence: Sequence) -> None:
        """Nothing to forget."""

    def end(self, sequence: Sequence) -> None:
        """Nothing to learn."""

    def measure(self, step: PlannedStep, result: StepResult, *, goes_on: bool) -> None:
        """Nothing depends on it."""
