"""Detects a worker that hangs in a step."""

from __future__ import annotations

import time


class Stopwatch:
    """Detects a hung worker: measures how long the oldest step in flight has been running.

    limit: seconds.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since: float | None = None

    def restart(self, running: bool) -> None:
        """Start at zero; stop if no step is running."""
        self._since = time.monotonic() if running else None

    @property
    def elapsed(self) -> float | None:
        """Seconds for which the oldest step has been running; None if no step runs."""
        return None if self._since is None else time.monotonic() - self._since

    @property
    def expired(self) -> bool:
        """True if the oldest step has been running for longer than the limit."""
        elapsed = self.elapsed
        return elapsed is not None and elapsed > self.limit
