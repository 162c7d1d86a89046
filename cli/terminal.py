"""Text of others on this terminal: what a model, a server or another user wrote must not control it."""

from __future__ import annotations

import sys
from typing import TextIO

# Characters that terminals obey rather than show: C0 and C1 controls and DEL; marks, embeddings, overrides and
# isolates of text direction, which make text read in another order than it has; separators that some take for line
# ends. A lone surrogate could not be written at all.
_CONTROLS = (
    *range(0x20),
    *range(0x7F, 0xA0),
    *(0x061C, 0x200E, 0x200F),
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)
_ESCAPED_IN_LINE = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_ESCAPED = {code: text for code, text in _ESCAPED_IN_LINE.items() if chr(code) not in "\n\t"}


def safe_text(text: str) -> str:
    r"""Return text that a terminal shows and does not obey: control characters but newline and tab as `\x1b`.

    Each character is replaced on its own, so a sequence that a stream cuts in two has no effect either.
    """
    return text.translate(_ESCAPED)


def safe_line(text: str) -> str:
    """Return the same on one line: newlines and tabs are replaced as well."""
    return text.translate(_ESCAPED_IN_LINE)


def show(text: str, end: str = "\n", stream: TextIO | None = None) -> None:
    """Print text of others at once: as it is into a file or a pipe, and as `safe_text` on a terminal.

    stream: default: standard output. Nothing is printed if it is closed.
    """
    stream = stream or sys.stdout
    if stream is not None:
        print(safe_text(text) if stream.isatty() else text, end=end, file=stream, flush=True)
