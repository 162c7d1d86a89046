"""`pagewire rm`: removes a model that `pagewire pull` has brought."""

from __future__ import annotations

import argparse

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.terminal import show
from pagewire.cli.models.pull import named


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "rm",
        help=SUMMARIES["rm"],
        description="Remove a model that `pagewire pull` has brought, or what there is of it. Nothing "
        "else is removed: models of the hub's cache go by `hf cache rm`. An engine that has it "
        "in memory keeps it until it ends.",
    )
    parser.add_argument("name", metavar="NAME", help="as `pagewire list` has it")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Remove the model.

    Raises:
        UsageError: the name is none of the hub. ModelNotFoundError: it was not pulled. OSError: it is being pulled.
    """
    from pagewire.ipc.files.pulled import remove

    show(f"{remove(named(options.name))} is removed")
    return 0
