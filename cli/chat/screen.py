"""Shows answers while they come: as they are, or on a terminal with thoughts dimmed and Markdown drawn."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Protocol

from pagewire.cli.console.terminal import safe_text, show

FENCES = ("```", "~~~")


class AnswerScreen(Protocol):
    """Where an answer is shown. It ends with `end`, whatever happens."""

    def thought(self, text: str) -> None:
        """Show more of the model's reasoning."""

    def text(self, text: str) -> None:
        """Show more of the answer."""

    def end(self) -> None:
        """Show what is left."""


class PlainScreen:
    """Text as the model writes it, with an empty line behind its reasoning."""

    def __init__(self) -> None:
        self._thinks = False

    def thought(self, text: str) -> None:
        """See `AnswerScreen`."""
        self._thinks = True
        show(text, end="")

    def text(self, text: str) -> None:
        """See `AnswerScreen`."""
        show("\n\n" + text if self._thinks else text, end="")
        self._thinks = False

    def end(self) -> None:
        """See `AnswerScreen`."""
        print()


class MarkdownScreen:
    """A terminal on which `rich` draws each paragraph, list, table or piece of code when it is complete.

    Until then its last lines stand there as they are.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._block: list[str] = []  # the complete lines of what is not drawn yet
        self._line = ""
        self._fence = ""
        self._thinks = False

    def thought(self, text: str) -> None:
        """See `AnswerScreen`."""
        self._thinks = True
        self._console.out(safe_text(text), style="dim", end="", highlight=False)

    def text(self, text: str) -> None:
        """See `AnswerScreen`."""
        from rich.text import Text

        if self._thinks:
            self._thinks = False
            self._console.out("\n")
        *lines, self._line = (self._line + safe_text(text)).split("\n")
        for line in lines:
            self._add(line)
        self._live.start()
        height = max(1, self._console.height - 2)
        self._live.update(Text("\n".join([*self._block[-height:], self._line])), refresh=True)

    def end(self) -> None:
        """See `AnswerScreen`."""
        self._block.append(self._line)
        self._draw()
        self._live.stop()
        if self._thinks:
            print()

    def _add(self, line: str) -> None:
        """Take a complete line; an empty one outside of code ends a block."""
        self._block.append(line)
        begin = line.lstrip()[:3]
        if not self._fence and begin in FENCES:
            self._fence = begin
        elif self._fence and begin == self._fence:
            self._fence = ""
        if not self._fence and not line.strip():
            self._draw()

    def _draw(self) -> None:
        from rich.markdown import Markdown
        from rich.text import Text

        text = "\n".join(self._block).strip("\n")
        self._block, self._line = [], ""
        if text:
            self._live.update(Text(""), refresh=True)
            self._console.print(Markdown(text, code_theme="ansi_dark", hyperlinks=False))


def new_screen() -> AnswerScreen:
    """The screen of one answer: drawn on a terminal with colours, if `rich` is installed."""
    draws = sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if draws and os.environ.get("TERM") != "dumb" and find_spec("rich"):
        return MarkdownScreen()
    return PlainScreen()
