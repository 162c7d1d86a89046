"""Promises end in time, also while no step is planned."""

from __future__ import annotations

from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.wings.wing import Wing


class PromiseTimer(Wing):
    """Ends the promises of a scheduler's prefixes in each turn of the loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._sequences = scheduler.sequences

    def check_timers(self, now: float) -> None:
        """End what was promised until now."""
        self._sequences.tick(now)
