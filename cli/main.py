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
    embed,
    generate,
    inspect,
    kernels,
    keys,
    quantize,
    rerank,
    route,
    run_batch,
    serve,
    top,
    worker,
)
from pagewire.cli.console.options import CommandParser, UsageError
from pagewire.cli.console.terminal import show
from pagewire.ipc.environment import adopt_vllm_names
from pagewire.ipc.errors import EngineBusyError, EngineDeadError, ProtocolError, RequestError
from pagewire.ipc.version import __version__

COMMANDS = (
    generate,
    chat,
    embed,
    rerank,
    serve,
    core,
    route,
    top,
    run_batch,
    bench,
    inspect,
    quantize,
    worker,
    keys,
    kernels,
    doctor,
    collect_env,
)


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser with every command and its options."""
    parser = CommandParser(prog="pagewire", description="LLM inference and serving in separate processes.")
    parser.add_argument("--version", action="version", version=f"pagewire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.register(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 is success, 1 a failure, 2 a mistake on the command line, 130 Ctrl-C, 141 a closed output pipe (SIGPIPE).
    """
    name = "pagewire"
    try:
        try:
            adopt_vllm_names()  # before logging is configured by some of them
            options = build_parser().parse_args(argv)
            name = f"pagewire {options.command}"
            return int(options.run(options))
        finally:
            flush_output()
    except UsageError as error:
        show(f"{name}: {error}", stream=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of standard output has closed the pipe
        return 128 + signal.SIGPIPE
    except (EngineDeadError, EngineBusyError, ProtocolError, RequestError, ValueError, OSError) as error:
        show(f"{name}: {error}", stream=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def flush_output() -> None:
    """Flush standard output here, where a failure can still set the exit status.

    Raises:
        OSError: the output could not be written and is dropped. BrokenPipeError: the pipe has no reader.
    """
    if sys.stdout is None:  # the parent process started this one with standard output closed
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the interpreter flushes again at exit
        raise


if __name__ == "__main__":
    sys.exit(main())
