"""What a user sees while a model loads: one line of the terminal, or lines of the log."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from pagewire.ipc.quoting import on_one_line
from pagewire.kernels.cpu.progress import is_compiling
from pagewire.workers.checkpoint.read_progress import WEIGHTS

logger = logging.getLogger("pagewire.worker")

PATIENCE_SECONDS = 1.0  # a start that is over by then says nothing
DRAW_SECONDS = 0.2
LOG_SECONDS = 10.0
BAR = 24  # characters
FIRST = "starting"
AFTER = {
    "import": "reading its configuration",
    "config": "building the model",
    "weights": "computing logits to compare with",
    "reference": "packing weights",
    "transform": "taking memory for the KV cache",
    "packed weights": "taking memory for the KV cache",
    "kv": "first steps",
}
"""What is done once a phase of `Phases` has ended, by the name of that phase."""


class LoadingLine:
    """Says how far the start of a model is, once it takes longer than a second; use with `with`.

    model: its name or path.
    draws: on a line of the terminal, if standard error is one and the log has warnings only. The line changes, and
        is cleared at the end. Else a line of the log says it every ten seconds.
    """

    def __init__(self, model: str, draws: bool) -> None:
        self._model, self._doing = on_one_line(Path(model).name or model), FIRST
        stream = sys.stderr
        is_terminal = stream is not None and stream.isatty()
        self._draws = draws and is_terminal and not logger.isEnabledFor(logging.INFO)
        self._began = time.monotonic()
        self._has_drawn = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading-line", daemon=True)

    def __enter__(self) -> LoadingLine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clear the line."""
        self._over.set()
        self._thread.join()
        if self._has_drawn:
            draw("")

    def ended(self, phase: str) -> None:
        """Say what comes next: a phase has ended."""
        self._doing = AFTER.get(phase, self._doing)

    def text(self) -> str:
        """The line as it is now."""
        share, seconds = WEIGHTS.share, time.monotonic() - self._began
        bar = "" if share is None else f" [{'#' * int(BAR * share):.<{BAR}}] {share:.0%}"
        return f"loading {self._model}: {self._doing}{bar}, {seconds:.0f} s"

    def _run(self) -> None:
        pause = PATIENCE_SECONDS if self._draws else LOG_SECONDS
        while not self._over.wait(pause):
            if is_compiling():  # which has a line of its own
                continue
            if self._draws:
                pause, self._has_drawn = DRAW_SECONDS, True
                draw(self.text())
            else:
                logger.info("%s", self.text())


def draw(text: str) -> None:
    """Write on the last line of the terminal, in place of what it had, and leave the cursor at its beginning.

    So whatever another process writes there meanwhile stands on the line alone. Nothing is written once the
    terminal is gone.
    """
    with suppress(OSError, ValueError):
        width = os.get_terminal_size(sys.stderr.fileno()).columns or len(text) + 1
        sys.stderr.write(f"\r\x1b[K{text[: width - 1]}\r")
        sys.stderr.flush()
