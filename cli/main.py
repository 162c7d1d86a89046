"""The `pagewire` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from pagewire import __version__
from pagewire.cli import bench, chat, collect_env, core, generate, keys
from pagewire.cli.options import UsageError, refuse_unknown
from pagewire.ipc.errors import EngineDeadError, ModelNotFoundError, RequestError
from pagewire.ipc.options import EngineArgs

COMMANDS = (generate, chat, core, bench, keys, collect_env)


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = argparse.ArgumentParser(
        prog="pagewire", description="LLM inference and serving in separate processes."
    )
    parser.add_argument("--version", action="version", version=f"pagewire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.register(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit status: 0; 1 after a failure, 2 after a mistake on the command line, 130 after Ctrl-C,
    141 if the reader of its output is gone.
    """
    options, extra = build_parser().parse_known_args(argv)
    try:
        refuse_unknown(extra, set(vars(options)) | set(EngineArgs.__dataclass_fields__))
        return int(options.run(options))
    except UsageError as error:
        print(f"pagewire {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return 128 + signal.SIGPIPE
    except (EngineDeadError, ModelNotFoundError, RequestError, ValueError, OSError) as error:
        print(f"pagewire {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
