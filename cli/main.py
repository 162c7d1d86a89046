"""The `pagewire` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from pagewire.cli.commands import (
    bench,
    chat,
    collect_env,
    core,
    doctor,
    generate,
    kernels,
    keys,
    run_batch,
    serve,
    top,
)
from pagewire.cli.options import Parser, UsageError
from pagewire.ipc.errors import EngineBusyError, EngineDeadError, ProtocolError, RequestError
from pagewire.ipc.version import __version__

COMMANDS = (generate, chat, serve, core, top, run_batch, bench, keys, kernels, doctor, collect_env)


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = Parser(prog="pagewire", description="LLM inference and serving in separate processes.")
    parser.add_argument("--version", action="version", version=f"pagewire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.register(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit status: 0; 1 after a failure, 2 after a mistake on the command line, 130 after Ctrl-C,
    141 if the reader of its output is gone.
    """
    name = "pagewire"
    try:
        try:
            options = build_parser().parse_args(argv)
            name = f"pagewire {options.command}"
            return int(options.run(options))
        finally:
            flush_output()
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has had enough
        return 128 + signal.SIGPIPE
    except (EngineDeadError, EngineBusyError, ProtocolError, RequestError, ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def flush_output() -> None:
    """Write what is buffered while a failure can still be told; what cannot be written is dropped.

    Raises:
        OSError: not all was written. BrokenPipeError: for nobody reads it.
    """
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        raise


if __name__ == "__main__":
    sys.exit(main())
