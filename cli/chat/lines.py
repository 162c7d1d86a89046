"""Reads what the user types: messages of one or more lines, with a history where a terminal is read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

BLOCK = '"""'  # a line of its own before and behind a message of several lines
MAX_HISTORY = 1000  # lines that are kept


class Lines:
    """The user's messages, in order. words: commands, which the tabulator completes."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._words = sorted(words)
        self._history: Path | None = None
        if sys.stdin is not None and sys.stdin.isatty():
            self._use_history()

    def read(self) -> str | None:
        """The next message that is not empty; None when the input ends.

        It has several lines if they end with a backslash, or stand between two lines of three quotation marks.
        """
        while sys.stdin is not None:
            try:
                text = self._message()
            except EOFError:
                print()
                return None
            if text:
                return text
        return None

    def close(self) -> None:
        """Write the history down."""
        if self._history is None:
            return
        import readline

        with suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(0o600)
            readline.write_history_file(self._history)

    def _message(self) -> str:
        line = input("> ").strip()
        if line == BLOCK:
            return "\n".join(iter(lambda: input(". "), BLOCK)).strip("\n")
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(". "))
        return "\n".join(lines)

    def _use_history(self) -> None:
        try:
            import readline
        except ImportError:  # a Python that was built without it reads lines as they are
            return
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self._history = Path(home) / "pagewire" / "chat_history"
        with suppress(OSError):
            readline.read_history_file(self._history)
        readline.set_history_length(MAX_HISTORY)
        readline.set_completer_delims(" ")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")

    def _complete(self, begin: str, index: int) -> str | None:
        fitting = [word for word in self._words if word.startswith(begin)] if begin else []
        return fitting[index] + " " if index < len(fitting) else None
