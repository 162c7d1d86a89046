"""When workers that were lost are started again, and when the core gives up. Pure: no clock."""

from __future__ import annotations

FIRST_PAUSE_SECONDS = 0.5  # before the second start in a row; doubled before each further one
LONGEST_PAUSE_SECONDS = 30.0
LONGEST_AWAITED_SECONDS = 5.0  # from one start to the next, while somebody waits for the workers
DECAY_SECONDS = 10.0  # in which workers have served, after which one loss less counts
MAX_FAILED_STARTS = (
    3  # in a row, of workers that have never been ready: the options or the model are at fault
)
MAX_FAILED_RESTARTS = 10  # in a row, of workers that have been ready: the machine may lack memory for a while
PATIENCE_SECONDS = 60.0  # in which starts of workers that have been ready fail before the core gives up


class Restarts:
    """Counts losses of workers, and dates their next start.

    A pause grows with the losses, and counts from the loss. While somebody waits for the workers, it is not longer
    than `LONGEST_AWAITED_SECONDS` and counts from the start of the lost ones: the time in which they loaded and
    served is part of it. So workers that have run for longer are replaced at once, and workers that die at once are
    still not started more often than that.
    """

    def __init__(self) -> None:
        self._started_at = 0.0
        self._lost_at: float | None = None  # None: they run
        self._pause = 0.0
        self._num_losses = 0
        self._ready_at: float | None = None
        self._num_failed, self._failing_since = 0, 0.0
        self._max_failed, self._patience = MAX_FAILED_STARTS, 0.0

    @property
    def running(self) -> bool:
        """True from a start to the next loss."""
        return self._lost_at is None

    def due(self, *, awaited: bool) -> float | None:
        """Time of the next start; None if the workers run. awaited: somebody waits for them."""
        if self._lost_at is None:
            return None
        if awaited:
            pause = min(self._pause, LONGEST_AWAITED_SECONDS)
            return max(self._lost_at, self._started_at + pause)
        return self._lost_at + self._pause

    def started(self, now: float) -> None:
        """Record a start, or that one is tried."""
        self._started_at, self._lost_at = now, None

    def ready(self, now: float) -> None:
        """Record that the workers are ready."""
        self._ready_at, self._num_failed = now, 0
        self._max_failed, self._patience = MAX_FAILED_RESTARTS, PATIENCE_SECONDS

    def lost(self, now: float) -> None:
        """Record a loss, or a start that failed."""
        served = 0.0 if self._ready_at is None else now - self._ready_at
        self._num_losses = max(0, self._num_losses - int(served / DECAY_SECONDS)) + 1
        if self._ready_at is None:
            self._failing_since = self._failing_since if self._num_failed else now
            self._num_failed += 1
        self._lost_at, self._ready_at, self._pause = now, None, 0.0
        if self._num_losses > 1:
            doublings = min(self._num_losses - 2, 30)
            self._pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**doublings)

    def rested(self, now: float) -> None:
        """Record that the workers have ended without a loss; the next start is due whenever it is wanted."""
        self._lost_at, self._ready_at, self._pause = now, None, 0.0

    @property
    def hopeless(self) -> bool:
        """True once too many starts in a row have failed, for too long."""
        if self._lost_at is None or self._num_failed < self._max_failed:
            return False
        return self._lost_at - self._failing_since >= self._patience
