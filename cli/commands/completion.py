"""`pagewire completion`: what a shell needs to complete the command's options and arguments."""

from __future__ import annotations

import argparse

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.terminal import show

SHELLS = ("bash", "zsh", "fish")


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

    show(shtab.complete(build_parser(), shell=options.shell))
    return 0
