"""docs/families.md, which `python -m benchmarks.parity --all --write` makes, and the list of it in docs/models.md.

python -m benchmarks.families
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PATH, MODELS = ROOT / "docs" / "families.md", ROOT / "docs" / "models.md"
HEADER = "| model type | class | | why |\n|---|---|---|---|"
WIDTH = 120  # of the lines of docs/models.md
PARAGRAPH = re.compile(r"^\*\*Served\*\* \(.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
INTRODUCTION = """\
# Model families

Every language model of transformers {version}, those that take pictures as well with text alone. Each is a tiny
random model in float32, with the layers and settings of its family.

- **equal**: greedy tokens are those of transformers' `generate`, prompts of several lengths chunked and batched
- **refused**: it is refused when it is loaded, with this reason
- **untested**: there is nothing to compare with, for this reason

This file is made by `python -m benchmarks.parity --all --write`, and the list in
[Models](models.md) by `python -m benchmarks.families`.
"""


class ModelRow(NamedTuple):
    """A model type, its class in transformers, and what came of it: "equal", "refused", "untested", and why."""

    model_type: str
    class_name: str
    verdict: str
    why: str = ""

    @property
    def line(self) -> str:
        """Its line of the table."""
        return f"| {self.model_type} | {self.class_name} | {self.verdict} | {self.why.replace('|', '/')} |"


def summary(families: Sequence[ModelRow]) -> str:
    """How many model types each verdict has."""
    counts = Counter(family.verdict for family in families)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def document(families: Sequence[ModelRow], version: str) -> str:
    """The text of docs/families.md. version: of transformers."""
    lines = "\n".join(family.line for family in families)
    return f"{INTRODUCTION.format(version=version)}\n**{summary(families)}**\n\n{HEADER}\n{lines}\n"


def read(text: str) -> list[ModelRow]:
    """The families of docs/families.md, given its text."""
    rows = text.partition(HEADER)[2].strip().splitlines()
    return [ModelRow(*(cell.strip() for cell in row.strip("|").split("|"))) for row in rows]


def paragraph(families: Sequence[ModelRow]) -> str:
    """The list of the families that are served."""
    names = sorted(family.model_type for family in families if family.verdict == "equal")
    listed = ", ".join(f"`{name}`" for name in names)
    # A name is in one piece.
    lines = textwrap.wrap(listed, WIDTH, break_on_hyphens=False, break_long_words=False)
    return f"**Served** ({len(names)} model types):\n" + "\n".join(lines) + "."


def with_list(page: str, families: Sequence[ModelRow]) -> str:
    """The text of docs/models.md with its list of families made anew."""
    return PARAGRAPH.sub(lambda _: paragraph(families), page, count=1)


def main() -> None:
    """Make the list in docs/models.md anew."""
    MODELS.write_text(with_list(MODELS.read_text(), read(PATH.read_text())))


if __name__ == "__main__":
    main()
