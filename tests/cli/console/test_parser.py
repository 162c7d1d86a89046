"""The parser of the command line: light where nothing runs, whole where tests and documents ask for all of it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from pagewire.cli.commands import ELSEWHERE, SUMMARIES, build_parser
from pagewire.cli.main import main

HEAVY = {"msgspec", "zmq", "yaml", "asyncio", "jinja2", "numpy", "torch", "transformers"}


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom pagewire.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.rstrip().rpartition("\n")
    assert HEAVY & set(modules.split()) == set()
    assert all(name in text and summary[:20] in text for name, summary in SUMMARIES.items())


def test_options_are_made_for_the_command_that_is_given() -> None:
    words = ["keys", "folder", "name"]
    assert build_parser(only="keys").parse_args(words) == build_parser().parse_args(words)


def test_a_word_that_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["genrate"])
    assert "unknown command 'genrate'; did you mean 'generate'?" in capsys.readouterr().err


@pytest.mark.parametrize("word", ELSEWHERE)
def test_commands_of_other_programs_say_what_to_type(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([word])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith(f"pagewire: unknown command '{word}'; ")
    assert "did you mean" not in said and len(said.splitlines()) == 1


def test_commands_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pagewire: give a command") and len(said.splitlines()) < 12
    lines = [line for line in said.splitlines() if line.startswith("  ")]
    for line in lines:
        build_parser().parse_args(shlex.split(line.strip().split("   ")[0])[1:])
    named = {name for text in ELSEWHERE.values() for name in re.findall(r"pagewire ([a-z-]+)", text)}
    assert len(lines) >= 4 and named <= set(SUMMARIES)
