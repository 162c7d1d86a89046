"""What a user sees while the kernels are compiled, which takes minutes, once per machine."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType

logger = logging.getLogger("pagewire.kernels")

QUARTERS = 4  # log lines of a compilation, beside the first and the last

_compilations: list[float] = []
_running: set[CompileProgress] = set()


def compile_seconds() -> float:
    """How long this process has compiled kernels so far; 0 if it found all of them in the cache."""
    return sum(_compilations)


def is_compiling() -> bool:
    """True while this process compiles kernels, and says so."""
    return bool(_running)


class CompileProgress:
    """Says how many parts are compiled: in the log, or on one line of the terminal if the log has warnings only.

    what: what is compiled. total: its parts. Use with `with`; `done` is for any thread.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._lock = threading.Lock()
        self._began = time.monotonic()
        stream = sys.stderr
        self._draws = stream is not None and stream.isatty() and not logger.isEnabledFor(logging.INFO)

    def __enter__(self) -> CompileProgress:
        _running.add(self)
        text = f"compiling {self._what}, once for this machine: {self._total} parts, which take minutes"
        if self._draws:
            self._draw(f"{text}...")
        else:
            logger.warning("%s", text)
        return self

    def done(self) -> None:
        """One more part is compiled."""
        with self._lock:
            self._done += 1
            seconds = time.monotonic() - self._began
            text = f"compiling {self._what}: {self._done} of {self._total} parts in {seconds:.0f} s"
            if self._draws:
                self._draw(text)
            elif self._done % max(1, self._total // QUARTERS) == 0:
                logger.warning("%s", text)  # at the level of the first line, which promises minutes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clear the line, and keep how long it took."""
        seconds = time.monotonic() - self._began
        _compilations.append(seconds)
        _running.discard(self)
        if self._draws:
            self._draw("")
        elif error is None:
            logger.warning("compiled %s in %.0f s", self._what, seconds)

    @staticmethod
    def _draw(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")  # in place of what the line had
        sys.stderr.flush()
