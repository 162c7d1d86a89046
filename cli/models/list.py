"""`pagewire list`: the models that `pagewire pull` has brought."""

from __future__ import annotations

import argparse
import time

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.terminal import show

ROW = "{:<50} {:>10}  {}"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "list",
        help=SUMMARIES["list"],
        description="List the models that `pagewire pull` has brought. Models that were downloaded when they were "
        "first used lie in the hub's cache: hf cache ls.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the models."""
    from pagewire.ipc.files.pulled import pulled_models

    show(ROW.format("NAME", "SIZE", "PULLED"))
    for model in pulled_models():
        pulled_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.pulled_at))
        show(ROW.format(model.name, f"{model.num_bytes / 1e9:.2f} GB", pulled_at))
    return 0
