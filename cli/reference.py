"""The table of all options and environment variables, written to docs/options.md of a checkout.

python -m pagewire.cli.reference
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pagewire.cli.commands import build_parser
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.ipc.environment import FOREIGN, INTERNAL, READ, Variable
from pagewire.ipc.options.engine_args import EngineArgs

PATH = Path(__file__).parents[1] / "docs" / "options.md"
INTRODUCTION = """\
# Options and environment variables

Every option of every command, and every variable that is read. Options of an engine are also keywords of `LLM(...)`
and `EngineArgs(...)`, and names in a YAML file (`--config`), with underscores in place of dashes; the command line
takes underscores as well (`--max_model_len`). vLLM's names that are missing here:
[compatibility.md](compatibility.md).

This file is made from the code: `python -m pagewire.cli.reference`.
"""
SHARED = (
    ("Options of an engine", {field.name for field in dataclasses.fields(EngineArgs)}, "core"),
    ("Options of a server", {field.name for field in dataclasses.fields(ServerOptions)}, "serve"),
)
"""Options that several commands have: title, names, and a command that has all of them."""
VARIABLES = """\
## Environment variables

A flag is `1` or `true`, `0` or `false`. Where a variable is not set, the one that begins with `VLLM_` in place of
`PAGEWIRE_` is read, and one line of the log names those. A program warns once of each variable with one of these
beginnings that nothing reads; [compatibility.md](compatibility.md) has vLLM's others.
"""


def document() -> str:
    """Return the text of docs/options.md."""
    commands = {parser.prog: parser for parser in parsers(build_parser())}
    parts = [INTRODUCTION]
    for prog, parser in commands.items():
        parts += [f"## {prog}", "", description(parser), ""]
        if rows := own_rows(parser):
            parts += [*table(("option", "value", "meaning"), rows), ""]
    for title, names, command in SHARED:
        parts += [f"## {title}", ""]
        for group in commands[f"pagewire {command}"]._action_groups:
            actions = [action for action in group._group_actions if action.dest in names and shown(action)]
            if actions:
                rows = [cells(commands[f"pagewire {command}"], action) for action in actions]
                parts += [f"### {group.title}", "", *table(("option", "value", "meaning"), rows), ""]
    parts += [VARIABLES, *variables(READ), "", "Variables of other programs:", "", *variables(FOREIGN), ""]
    return "\n".join(parts)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser, and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                yield from parsers(child)


def description(parser: argparse.ArgumentParser) -> str:
    """Return what a command does, and which shared options it has."""
    text = " ".join((parser.description or "").split())
    dests = {action.dest for action in parser._actions if shown(action)}
    links = [
        f"[{'all' if names <= dests else 'some'} {title.lower()}](#{title.lower().replace(' ', '-')})"
        for title, names, _ in SHARED
        if names & dests
    ]
    return f"{text} It has {' and '.join(links)}." if links else text


def shown(action: argparse.Action) -> bool:
    """True for an argument that `--help` shows and that is not a list of commands."""
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction)


def own_rows(parser: argparse.ArgumentParser) -> list[tuple[str, ...]]:
    """Return the rows of a command's arguments, without all shared ones that it has completely."""
    dests = {action.dest for action in parser._actions}
    elsewhere = set().union(*(names for _, names, _ in SHARED if names <= dests))
    actions = [action for action in parser._actions if shown(action) and action.dest not in elsewhere]
    return [cells(parser, action) for action in actions]


def cells(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, ...]:
    """Return the row of an argument: its names, what it takes, its meaning."""
    names = action.option_strings or [str(action.metavar or action.dest)]
    value = "" if action.nargs == 0 or not action.option_strings else str(action.metavar or "")
    if action.choices is not None and not value:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    more = " ..." if action.nargs in ("+", "*") else ""
    meaning = " ".join(parser._get_formatter()._expand_help(action).split())
    return ", ".join(f"`{name}`" for name in names), f"`{value}`{more}" if value else "", meaning


def variables(rows: Mapping[str, Variable]) -> list[str]:
    """Return the table of variables."""
    visible = {name: row for name, row in rows.items() if name not in INTERNAL}
    return table(
        ("variable", "meaning", "default"),
        [
            (", ".join(f"`{part}`" for part in name.split(", ")), row.meaning, row.default)
            for name, row in visible.items()
        ],
    )


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a table."""
    lines = [list(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
