"""A part of an engine that a plain request does without, as the core's loop sees it.

`wiring.py` says which parts an engine has. The loop calls each in its turn, and knows none by name.
"""

from __future__ import annotations

import math
from typing import Any

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.step import PlannedStep, StepOutcomes
from pagewire.ipc.wire.steps import StepResult
from pagewire.ipc.wire.worker_messages import Ready


class Wing:
    """What the loop calls in each turn, and when workers come and go. As it stands here, it does nothing.

    Times are monotonic, in seconds.
    """

    # ------------------------------------------------------------ a turn of the loop, in this order

    def wait(self, now: float) -> float:
        """Seconds after which the loop should not wait for messages any longer."""
        return math.inf

    def check_timers(self, now: float) -> None:
        """End what has waited for too long."""

    def advance(self) -> None:
        """Take in what has come to its end, before steps are launched."""

    @property
    def holds_steps(self) -> bool:
        """True while no step may be launched."""
        return False

    def flush(self, now: float) -> None:
        """Send what is to be sent, after steps were launched and their tokens delivered."""

    def turned(self, seconds: float) -> None:
        """Learn how long this turn took, the wait for messages apart."""

    def tidy(self) -> None:
        """Give memory back; called about once a second."""

    # ------------------------------------------------------------ requests and steps

    def check_submit(self) -> None:
        """Check that requests are taken now; else raise EngineBusyError, or a kind of it, with the reason."""

    def submitted(self, group: list[Sequence]) -> None:
        """Learn of a request that was taken, by its sequences."""

    def refused(self, why: Exception) -> None:
        """Learn of a request that was refused on arrival."""

    def admitted(self) -> None:
        """Act on the sequences that wait: some came, or some were scheduled."""

    def planned(self) -> None:
        """Act before the plan that was just made, if there is one, is sent."""

    def committed(self, step: PlannedStep, result: StepResult, outcomes: StepOutcomes, now: float) -> None:
        """Learn from a step that was committed."""

    def ended(self, sequence: Sequence, reason: str, now: float) -> None:
        """Learn of a sequence that has ended, with its finish reason."""

    # ------------------------------------------------------------ the workers

    def receive(self, message: Any) -> bool:
        """Take a message of the workers; False if it is for another part."""
        return False

    def worker_ready(self, ready: Ready) -> None:
        """Learn what workers have that are ready, those of the start among them."""

    def worker_lost(self, why: str, *, was_ready: bool) -> None:
        """Take back what the workers had. What they ran is queued again by then."""

    def start_failed(self, why: str) -> None:
        """Learn that workers could not be started."""

    @property
    def awaits_workers(self) -> bool:
        """True if something waits for workers, so that they should be started soon."""
        return False

    # ------------------------------------------------------------ the end

    def has_saved(self) -> bool:
        """Begin to save what another start can use; True once all of it is saved."""
        return True

    def close(self) -> None:
        """End processes of its own."""
