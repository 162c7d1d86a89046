"""When workers that were lost are started again, and when the core gives up. Pure: no clock."""

from __future__ import annotations

FIRST_PAUSE_SECONDS = 0.5  # before the second start in a row; doubled before each further one
LONGEST_PAUSE_SECONDS = 30.0
DECAY_SECONDS = 10.0  # in which workers have served, after which one loss less counts
MAX_FAILED_STARTS = (
    3  # in a row, of workers that have never been ready: the options or the model are at fault
)
MAX_FAILED_RESTARTS = 10  # in a row, of workers that have been ready: the machine may lack memory for a while


class Restarts:
    """Counts losses of workers, and dates their next start.

    Attributes:
        due: monotonic time of the next start; None if the workers run.
    """

    def __init__(self) -> None:
        self.due: float | None = None
        self._num_losses = 0
        self._ready_at: float | None = None
        self._num_failed = 0
        self._limit = MAX_FAILED_STARTS

    def lost(self, now: float) -> float:
        """Record a loss, or a start that failed; returns the pause before the next start, in seconds."""
        served = 0.0 if self._ready_at is None else now - self._ready_at
        self._num_losses = max(0, self._num_losses - int(served / DECAY_SECONDS)) + 1
        self._num_failed = 0 if self._ready_at is not None else self._num_failed + 1
        self._ready_at = None
        pause = 0.0
        if self._num_losses > 1:
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._num_losses - 2, 30))
        self.due = now + pause
        return pause

    def ready(self, now: float) -> None:
        """Record that the workers are ready."""
        self._ready_at = now
        self._num_failed, self._limit = 0, MAX_FAILED_RESTARTS

    @property
    def hopeless(self) -> bool:
        """True once too many starts in a row have failed."""
        return self._num_failed >= self._limit
