"""The documents of the repository, and the blocks of code in them.

A block runs in a test (tests/end_to_end/test_documents.py) unless the line above it says why not:
`<!-- not run: it needs a GPU -->`. A block that is a file of a package, which a test writes, has
`<!-- file: NAME -->`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY", "tests/README")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(
    r"(?:^ *<!-- (?P<marker>.*?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
ENDLESS = {"serve", "core", "route", "worker", "chat", "top"}
"""Commands that run until somebody ends them: the tests have a core and a server, and parse these only."""


class Block(NamedTuple):
    """A block of code. marker: the comment above it, "" if there is none. line: of its first line of code."""

    document: Path
    line: int
    language: str
    text: str
    marker: str

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether a test runs it as it stands."""
        return not self.marker

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a shell block, without comments and what is sent to the background."""
        lines = self.text.replace("\\\n", " ")
        return [words for line in joined(lines) if (words := words_of(line))]


def joined(text: str) -> Iterator[str]:
    """Yield the lines of a shell script, those of an open quotation as one."""
    line = ""
    for part in text.splitlines():
        line += part
        if line.count("'") % 2:
            line += "\n"
            continue
        yield line
        line = ""


def words_of(line: str) -> list[str]:
    """Return the words of a line of shell, without variables that it sets, comments and a last `&`."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return words[:-1] if words[-1:] == ["&"] else words


def blocks_of(document: Path) -> Iterator[Block]:
    """Yield the blocks of a document."""
    text = document.read_text("utf-8")
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        yield Block(document, line, match["language"], match["text"], match["marker"] or "")


def blocks(*languages: str) -> list[Block]:
    """Return all blocks of some languages."""
    return [block for document in DOCUMENTS for block in blocks_of(document) if block.language in languages]
