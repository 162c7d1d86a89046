"""Text of others on this terminal: what a model, a server or another user wrote must not control it."""

from __future__ import annotations

import sys
from typing import TextIO

from pagewire.ipc.quoting import escapes

_ESCAPED = {code: text for code, text in escapes().items() if chr(code) not in "\n\t"}


def safe_text(text: str) -> str:
    r"""Return text that a terminal shows and does not obey: control characters but newline and tab as `\x1b`.

    Each character is replaced on its own, so a sequence that a stream cuts in two has no effect either.
    """
    return text.translate(_ESCAPED)


def show(text: str, end: str = "\n", stream: TextIO | None = None) -> None:
    """Print text of others at once: as it is into a file or a pipe, and as `safe_text` on a terminal.

    stream: default: standard output. Nothing is printed if it is closed.
    """
    stream = stream or sys.stdout
    if stream is not None:
        print(safe_text(text) if stream.isatty() else text, end=end, file=stream, flush=True)
