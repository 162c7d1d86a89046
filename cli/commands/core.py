"""`pagewire core`: a standalone engine core that frontends attach to."""

from __future__ import annotations

import argparse
from pathlib import Path

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.options import add_engine_options, engine_args, seconds
from pagewire.cli.console.parser import UsageError
from pagewire.ipc.logs import FORMATS

DEFAULT_NAME = "core"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "core",
        help=SUMMARIES["core"],
        description="Run an engine core until SIGTERM or SIGINT: it then finishes running requests and refuses new "
        "ones; a second signal ends it at once. Prints 'ready ADDRESS' on standard output once the model is "
        "loaded. The exit status is 0 after a signal, and 1 after a failure, whose cause is in the log.",
    )
    group = parser.add_argument_group("Listening")
    group.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="ipc:///path or tcp://host:port (default: an ipc socket private to this user)",
    )
    group.add_argument("--curve-secret", metavar="FILE", help="CURVE encryption: the core's NAME.key_secret")
    group.add_argument(
        "--curve-clients",
        metavar="DIR",
        help="CURVE encryption: folder with NAME.key of every frontend to accept",
    )
    group.add_argument(
        "--allow-uid",
        type=int,
        action="append",
        default=[],
        metavar="UID",
        help="user id that may attach to an ipc address, beside your own and root; may be repeated. The socket's "
        "folder must let that user in",
    )
    group.add_argument(
        "--rights",
        type=Path,
        metavar="FILE",
        help="YAML file that says what each frontend may do: lists of read, generate, events, blocks and control "
        "for uid:NUMBER, curve:NAME (its certificate), tcp (loopback without keys) and default (without the file: "
        "everything)",
    )
    group.add_argument(
        "--drain-seconds",
        type=seconds,
        default=30.0,
        metavar="FLOAT",
        help="seconds for running requests to finish after SIGTERM (default: %(default)s)",
    )
    add_engine_options(parser)
    parser.add_argument("--log-format", choices=FORMATS, help="format of log lines (default: text)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the core until it is stopped and return the exit status."""
    from pagewire.ipc.host.system import require_linux

    require_linux()
    from pagewire.engine_core.daemon import Listen, serve
    from pagewire.ipc import logs
    from pagewire.ipc.environment import check_environment
    from pagewire.ipc.wire.sockets import private_address

    logs.configure(options.log_format)
    args = engine_args(options)
    try:
        check_environment()
        listen = Listen(
            address=options.listen or private_address(DEFAULT_NAME),
            curve_secret=Path(options.curve_secret) if options.curve_secret else None,
            curve_clients=Path(options.curve_clients) if options.curve_clients else None,
            allowed_users=tuple(options.allow_uid),
            rights=options.rights,
            drain_seconds=options.drain_seconds,
            announce=True,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return serve(args, listen)
