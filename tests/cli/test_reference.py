"""docs/options.md has every option of every command, and every environment variable that is read."""

from __future__ import annotations

from pagewire.cli.commands import build_parser
from pagewire.cli.reference import PATH, document, parsers, shown
from pagewire.ipc.environment import INTERNAL, READ


def test_the_table_is_complete_and_in_step() -> None:
    text = PATH.read_text(encoding="utf-8")
    assert text == document(), "run python -m pagewire.cli.reference"
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    shared = sections["Options of an engine"] + sections["Options of a server"]
    for parser in parsers(build_parser()):
        section = sections[parser.prog]
        place = section + shared * ("options-of-" in section)
        for action in filter(shown, parser._actions):
            for name in action.option_strings or [str(action.metavar or action.dest)]:
                assert f"`{name}`" in place, (parser.prog, name)
    assert all(f"\n| `{name}` |" in sections["Environment variables"] for name in READ.keys() - INTERNAL)
