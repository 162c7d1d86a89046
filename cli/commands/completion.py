"""`pagewire completion`: what a shell needs to complete the command's options and arguments."""

from __future__ import annotations

import argparse

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.terminal import show

SHELLS = ("bash", "zsh", "fish")
FOLDERS = ("DIR", "FOLDER")
FILES = ("FILE", "PATH", "MODEL", "OUT")
"""The names that files have in the help; a model may be one, or a folder."""
MODELS = ("model", "tokenizer", "chat_template")
"""Options with a file or a folder whose value has no name of its own there."""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "completion",
        help=SUMMARIES["completion"],
        description="Print a shell's completion of pagewire's commands and options. Bash: "
        "`pagewire completion bash > ~/.local/share/bash-completion/completions/pagewire`; zsh: a file _pagewire "
        "in a folder of $fpath; fish: ~/.config/fish/completions/pagewire.fish.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the completion, made of the parser of all commands."""
    import shtab

    from pagewire.cli.commands import build_parser

    parser = build_parser()
    complete_files(parser)
    show(shtab.complete(parser, shell=options.shell))
    return 0


def complete_files(parser: argparse.ArgumentParser) -> None:
    """Mark all options and arguments that are files or folders, also those of commands, to be completed as such."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                complete_files(command)
        elif action.metavar in FOLDERS or action.dest.endswith(("_dir", "_root")):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in FILES or action.dest in MODELS or action.dest.endswith(("_path", "file")):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
