"""The parser of the command line. It imports next to nothing, so that `pagewire --help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pagewire.ipc.options.argument_parser import FlexibleArgumentParser


class UsageError(ValueError):
    """A mistake on the command line; printed without a traceback, exit status 2."""


class CommandParser(FlexibleArgumentParser):
    """An argument parser that reports a mistake in one line, without usage text, and suggests a similar option.

    Attributes:
        elsewhere: names that other programs give commands, and what to type here.
    """

    elsewhere: Mapping[str, str] = {}

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is no choice; of a command, say which is meant."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            from pagewire.ipc.bounds import unknown_name  # which imports msgspec: `--help` goes without it

            text = unknown_name("command", value, action.choices)
            if (ours := self.elsewhere.get(value)) is not None:
                text = f"unknown command {value!r}; {ours}"
            self.error(text)
        super()._check_value(action, value)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse `args`; unlike argparse, end with an error if an argument is unknown. Sub-commands use this too."""
        parsed, extra = super().parse_known_args(args, namespace)
        for argument in extra:
            if argument.startswith("--"):
                from pagewire.ipc.bounds import (
                    unknown_name,  # which imports msgspec: `--help` goes without it
                )

                self.error(unknown_name("option", argument.split("=")[0], self._option_string_actions))
        if extra:
            self.error(f"unexpected argument {extra[0]!r}")
        return parsed, extra

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help or an error; argparse's own method hides that it could not be written.

        Raises:
            OSError: it could not be written.
        """
        stream = file or sys.stderr
        if message and stream is not None:
            stream.write(message)
