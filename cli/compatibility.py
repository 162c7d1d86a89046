"""The documentation of `ipc.compatibility`, written to docs/compatibility.md of a checkout.

python -m pagewire.cli.compatibility
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import get_args

from pagewire.ipc.compatibility import (
    FOUNDATIONS,
    NAMES,
    OPTIONS,
    REQUEST_FIELDS,
    VALUES,
    VARIABLES,
    Absent,
)

PATH = Path(__file__).parents[1] / "docs" / "compatibility.md"
INTRODUCTION = """\
# Names of vLLM that pagewire does not have

Each name is refused with its reason and what to use instead. Some values are accepted: those that ask for what
happens anyway, and, in *italics*, those that change no output; one warning says that they have no effect. What is
marked "yet" is to be built.

This file is made from `ipc/compatibility.py`: `python -m pagewire.cli.compatibility`.

**Usage statistics are never collected.** Nothing is sent anywhere, so there is nothing to opt out of.
"""
SECTIONS: tuple[tuple[str, str, Mapping[str, Absent]], ...] = (
    ("Options", "By keyword, on the command line (with dashes) and in a YAML file.", OPTIONS),
    ("Values of options", "They are refused.", VALUES),
    (
        "Environment variables",
        "A program warns once of each variable that begins with `VLLM_` or `PAGEWIRE_` and is not read. Most of "
        "vLLM's have a counterpart that begins with `PAGEWIRE_`, which the warning names.",
        VARIABLES,
    ),
    (
        "Fields of requests",
        "By the type of the request in `/openapi.json`, those of Anthropic's and Ollama's APIs as well.",
        REQUEST_FIELDS,
    ),
    ("Attributes and arguments", "The error says what to write.", NAMES),
    ("Hardware, software and services", "pagewire does without them.", FOUNDATIONS),
)


def document() -> str:
    """Return the text of docs/compatibility.md."""
    parts = [INTRODUCTION]
    for title, text, rows in SECTIONS:
        accepts = any(row.silent or row.warned for row in rows.values())
        parts.append(f"## {title}\n\n{text}\n")
        parts.append(f"| name | why | instead |{' accepted |' * accepts}\n|---|---|---|{'---|' * accepts}")
        parts += [line(name, row, accepts) for name, row in rows.items()]
        parts.append("")
    return "\n".join(parts)


def line(name: str, row: Absent, accepts: bool) -> str:
    """Return the line of a row. accepts: the table has a column of accepted values."""
    cells = [f"`{name}`", row.reason + " (yet)" * row.pending, row.instead]
    cells += [accepted(row)] * accepts
    return f"| {' | '.join(cells)} |"


def accepted(row: Absent) -> str:
    """Return the values that are accepted, as code; in italics those with a warning."""
    warned = row.warned if isinstance(row.warned, tuple) else kinds(row.warned)
    return ", ".join([*(f"`{value!r}`" for value in row.silent), *(f"*{value}*" for value in warned)])


def kinds(kind: type | UnionType) -> list[str]:
    """Return the names of a type, or of the types in a union."""
    if kind is object:
        return ["any"]
    return [part.__name__ for part in get_args(kind) or (kind,)]


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(document(), encoding="utf-8")
