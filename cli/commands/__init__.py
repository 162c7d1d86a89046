"""The commands of `pagewire`: a module for each, which is imported when its command is given."""

from __future__ import annotations

import argparse
from importlib import import_module

from pagewire.cli.console.parser import CommandParser
from pagewire.ipc.version import __version__

SUMMARIES = {
    "generate": "complete a prompt",
    "chat": "talk to a model",
    "transcribe": "write what is said in a recording",
    "embed": "embed texts",
    "rerank": "sort documents for a query",
    "serve": "serve a model over HTTP with OpenAI's API",
    "core": "run an engine core that frontends attach to",
    "route": "serve several cores of one model as if they were one",
    "top": "watch a running core: its frontends, requests and speed",
    "run-batch": "answer an OpenAI batch file",
    "bench": "measure speed",
    "inspect": "what a model takes, and whether it fits, without loading it",
    "quantize": "write a copy of a model with weights of 8 or 4 bits",
    "worker": "run a worker that joins a core on this or another machine",
    "keys": "make an API key or a CURVE certificate",
    "kernels": "compile CUDA kernels ahead of time",
    "doctor": "check what models run on here: the GPUs, or the CPU",
    "completion": "complete commands and options in a shell",
    "collect-env": "print versions and hardware, for a bug report",
}
"""Names of the commands, and what each does in a line of `pagewire --help`."""


ELSEWHERE = {
    "benchmark": "bench",
    "batch": "run-batch",
    "complete": "generate",
    "ps": "top",
    "run": "chat",
    "show": "inspect",
    "start": "serve",
}
"""Commands of other engines, and what they are called here."""


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the argument parser with every command; their options are there, too, or those of one command.

    only: the name of that command, "" for options of none. None: of all commands.
    """
    parser = CommandParser(prog="pagewire", description="LLM inference and serving in separate processes.")
    parser.elsewhere = ELSEWHERE
    parser.add_argument("--version", action="version", version=f"pagewire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in SUMMARIES.items():
        if only in (None, name):
            import_module(f"pagewire.cli.commands.{name.replace('-', '_')}").register(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser
