"""`pagewire worker`: a worker on this machine for a core on this or another one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.options import seconds
from pagewire.cli.console.parser import UsageError
from pagewire.ipc.logs import FORMATS

RANKS = ("RANK", "LWS_WORKER_INDEX")  # of torchrun, and of Kubernetes' LeaderWorkerSet


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "worker",
        help=SUMMARIES["worker"],
        description="Join an engine that was started with --distributed-executor-backend join, and run one of its "
        "workers here until the engine ends. The exit status is 0 then, and 1 if the engine refuses this worker or "
        "there is none.",
    )
    parser.add_argument(
        "--join", required=True, metavar="ADDRESS", help="tcp://HOST:PORT, the engine's --join-address"
    )
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the engine's --join-key (default: that of an engine of this user)",
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="INT",
        help=f"rank to take (default: ${' or $'.join(RANKS)}, else any free one)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=300.0,
        metavar="FLOAT",
        help="seconds to wait for the engine, at first and after it was lost (default: %(default)s)",
    )
    parser.add_argument("--log-format", choices=FORMATS, help="format of log lines (default: text)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the agent until the engine ends."""
    from pagewire.ipc.host.system import require_linux

    require_linux()
    from pagewire.ipc import logs
    from pagewire.ipc.environment import check_environment
    from pagewire.ipc.join.group_key import default_key_file
    from pagewire.ipc.wire.sockets import check_address
    from pagewire.workers.process.agent import Agent

    logs.configure(options.log_format)
    try:
        check_environment()
        address = check_address(options.join)
        if not address.startswith("tcp://"):
            raise ValueError(f"--join takes tcp://HOST:PORT, got {address!r}")
        rank = options.rank if options.rank is not None else rank_of_launcher()
    except ValueError as error:
        raise UsageError(str(error)) from error
    Agent(address, options.key or default_key_file(), rank, options.wait).run()
    return 0


def rank_of_launcher() -> int | None:
    """The rank that the program which started this one has given it; None if none has.

    Raises:
        ValueError: it is no number.
    """
    for name in RANKS:
        if text := os.environ.get(name):
            if not text.isdecimal():
                raise ValueError(f"{name} must be a number, got {text!r}")
            return int(text)
    return None
