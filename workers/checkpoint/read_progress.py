"""How much of a model's weights this process has read, for whoever shows how far a start is. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ReadProgress:
    """Bytes of weights that are read, and that a start will read in all; 0 where that is not known.

    Threads add to `done` without a lock: it is looked at, and nothing depends on it.
    """

    done: int = 0
    total: int = 0

    def begin(self, total: int) -> None:
        """Start at zero."""
        self.done, self.total = 0, total

    @property
    def share(self) -> float | None:
        """The share that is read, in [0, 1]; None while nothing is, or where the whole is not known."""
        return min(1.0, self.done / self.total) if self.done and self.total else None


WEIGHTS = ReadProgress()
"""Of this process."""
