"""The commands of `pagewire`: a module for each, here or in `cli/models`, imported when its command is given."""

from __future__ import annotations

import argparse
from importlib import import_module

from pagewire.cli.console.parser import CommandParser
from pagewire.cli.console.versions import VersionAction

SUMMARIES = {
    "generate": "complete a prompt",
    "chat": "talk to a model",
    "transcribe": "write down what is said in a recording",
    "embed": "embed texts",
    "rerank": "sort documents for a query",
    "serve": "serve a model over HTTP with OpenAI's API",
    "core": "run an engine core that frontends attach to",
    "route": "serve several cores of one model as if they were one",
    "top": "watch a running core: its frontends, requests and speed",
    "pull": "download a model of the Hugging Face hub",
    "rm": "remove a model that was pulled",
    "list": "list the models that were pulled",
    "ps": "list the models that a server has in memory",
    "run-batch": "answer an OpenAI batch file",
    "bench": "measure the speed of an engine or a server",
    "inspect": "say how much memory a model takes, and whether it fits, without loading it",
    "quantize": "write a copy of a model with weights of 8 or 4 bits",
    "worker": "run a worker that joins a core on this or another machine",
    "keys": "make an API key or a CURVE certificate",
    "kernels": "compile CUDA kernels ahead of time",
    "doctor": "check whether models run on this machine: on its GPUs, or on its CPU",
    "completion": "complete commands and options in a shell",
    "collect-env": "print versions and hardware, for a bug report",
}
"""Names of the commands, and what each does in a line of `pagewire --help`."""

OF_MODELS = frozenset({"pull", "rm", "list", "ps"})
"""Those in the folder `cli/models`."""

ELSEWHERE = {
    "batch": "it is pagewire run-batch",
    "benchmark": "it is pagewire bench",
    "complete": "it is pagewire generate",
    "ls": "it is pagewire list",
    "models": "it is pagewire list",
    "run": "it is pagewire chat --model MODEL",
    "show": "it is pagewire inspect MODEL",
    "start": "it is pagewire serve MODEL",
    "stop": "a core or a server ends by Ctrl-C, or by SIGTERM after its open requests",
}
"""Commands of other programs, and what to type here."""

NEXT = """\
pagewire: give a command. To begin:

  pagewire generate 'The "with" statement'    complete a prompt with the small model that comes with pagewire
  pagewire serve demo                         serve that model over HTTP, with a chat at http://127.0.0.1:8000
  pagewire chat --model OWNER/MODEL           talk to a model of the Hugging Face hub, a folder or a GGUF file
  pagewire inspect OWNER/MODEL                say whether a model fits in memory, before it is downloaded
  pagewire doctor                             check whether models run on this machine

All commands: pagewire --help
"""
"""What `pagewire` alone says."""


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the argument parser with every command; their options are there, too, or those of one command.

    only: the name of that command, "" for options of none. None: of all commands.
    """
    parser = CommandParser(
        prog="pagewire",
        description="Run language models on this machine, and serve them over HTTP.",
        epilog="`pagewire` alone says how to begin; `pagewire COMMAND --help` has the options of a command.",
    )
    parser.elsewhere = ELSEWHERE
    parser.add_argument("--version", action=VersionAction)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, summary in SUMMARIES.items():
        if only in (None, name):
            folder = "models" if name in OF_MODELS else "commands"
            import_module(f"pagewire.cli.{folder}.{name.replace('-', '_')}").register(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser
