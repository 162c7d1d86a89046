"""The parser of the command line: light where nothing runs, whole where tests and documents ask for all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagewire.cli.commands import SUMMARIES, build_parser
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
