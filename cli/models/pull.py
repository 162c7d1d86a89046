"""`pagewire pull`: brings a model of the Hugging Face hub into the folder of pulled models."""

from __future__ import annotations

import argparse
import sys
import threading
from typing import TYPE_CHECKING

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.parser import UsageError
from pagewire.cli.console.terminal import show

if TYPE_CHECKING:
    from pagewire.ipc.files.hub_names import HubName
    from pagewire.ipc.files.pull import PullProgress

NAME_HELP = "hf:owner/repository:Q4_K_M; without a quantisation Q4_K_M, else another one"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "pull",
        help=SUMMARIES["pull"],
        description="Download a model of the Hugging Face hub: the GGUF file of a quantisation, all its "
        "parts, or the safetensors of a repository without GGUF files. A download that broke off "
        "goes on where it ended, and "
        "each file is checked by its digest. HF_TOKEN and HF_ENDPOINT count as elsewhere. "
        "`pagewire serve NAME` and `pagewire serve --pulled` take it from there.",
    )
    parser.add_argument("name", metavar="NAME", help=NAME_HELP)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Pull, and print how far that is.

    Raises:
        UsageError: the name is none of the hub. Exceptions of `pull`.
    """
    from pagewire.ipc.files.pull import pull

    given = named(options.name)
    model = pull(given, None, ProgressLine().show, threading.Event())
    show(f"{model.name} is there: pagewire serve {model.name}")
    return 0


def named(name: str) -> HubName:
    """The model of the hub with this name.

    Raises:
        UsageError: it is the name of no such model.
    """
    from pagewire.ipc.errors import ModelNotFoundError
    from pagewire.ipc.files.hub_names import hub_name

    try:
        given = hub_name(name)
    except ModelNotFoundError as error:
        raise UsageError(str(error)) from error
    if given is None:
        raise UsageError(f"{name!r} is no model of the Hugging Face hub: write hf:owner/repository:Q4_K_M")
    return given


class ProgressLine:
    """Writes on standard error how far a pull is: on a terminal a line that changes, else a line for each step."""

    def __init__(self) -> None:
        self._status = ""

    def show(self, step: PullProgress) -> None:
        """Write a step."""
        stream = sys.stderr
        if stream is None:
            return
        is_new, self._status = step.status != self._status, step.status
        text = step.status
        if step.total:
            text += f": {step.completed / 1e6:,.0f} of {step.total / 1e6:,.0f} MB"
        if not stream.isatty():
            if is_new or step.completed == step.total > 0:
                show(text, stream=stream)
            return
        show(f"{text:<70}", end="\n" if step.completed == step.total else "\r", stream=stream)
