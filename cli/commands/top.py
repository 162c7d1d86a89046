"""`pagewire top`: live view of a running core's frontends, requests and speed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.commands.top_snapshot import lines, take_snapshot
from pagewire.cli.console.options import add_peer_options
from pagewire.cli.console.parser import UsageError
from pagewire.cli.console.running import running_cores, table
from pagewire.cli.console.terminal import show
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.quoting import quoted

if TYPE_CHECKING:
    from pagewire.frontend.core.client import CoreClient


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "top",
        help=SUMMARIES["top"],
        description="Watch a running core. Keys: a ends the selected request, p pauses and resumes the engine, "
        "s changes the sort order, q quits. With --once or --json, print one snapshot and exit.",
    )
    group = parser.add_argument_group("Attaching")
    group.add_argument(
        "--attach",
        metavar="ADDRESS",
        help="ipc://... or tcp://..., or the name of a socket as the list has it (default: the core that this user "
        "runs here; of several, the list is printed)",
    )
    add_peer_options(group)
    parser.add_argument(
        "--interval",
        type=interval,
        default=1.0,
        metavar="FLOAT",
        help="seconds between two snapshots (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one snapshot as text")
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON")
    parser.set_defaults(run=run)


def interval(text: str) -> float:
    """Parse a duration of at least 0.1 seconds (an argparse type)."""
    if not (value := float(text)) >= 0.1:
        raise argparse.ArgumentTypeError(f"must be 0.1 or more, got {text}")
    return value


def run(options: argparse.Namespace) -> int:
    """Show the live view until the user quits, or print one snapshot."""
    once = options.once or options.json
    check_curve(options)
    if not once:
        check_terminal()
    if options.attach is None:
        cores = running_cores()
        if len(cores) > 1:
            show("\n".join(table(cores)))
            show("several cores run here: --attach SOCKET watches one", stream=sys.stderr)
            return 0
        if not cores:
            raise EngineDeadError(
                "no core of this user runs here: `pagewire serve MODEL` starts one; --attach ADDRESS finds others"
            )
        options.attach = cores[0].address
    client = attach(options)
    try:
        if once:
            snapshot = take_snapshot(client, options.interval)
            show(json.dumps(snapshot.as_dict()) if options.json else "\n".join(lines(snapshot)))
            return 0
        from pagewire.cli.commands.top_screen import Screen

        screen = Screen(client, options.interval)
        screen.run()
        if screen.failure is not None:
            raise screen.failure
        return 0
    finally:
        client.close()


def check_terminal() -> None:
    """Check that the live view can run.

    Raises:
        UsageError: there is no terminal, or textual is not installed.
    """
    try:
        import textual  # noqa: F401
    except ImportError:
        raise UsageError("the live view needs textual: pip install 'pagewire[top]'; or use --once") from None
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()):
        raise UsageError("the live view needs a terminal; use --once or --json")


def check_curve(options: argparse.Namespace) -> None:
    """Check that the files of CURVE keys are given both or not at all.

    Raises:
        UsageError: only one of them is given.
    """
    if bool(options.curve_secret) != bool(options.curve_server):
        raise UsageError("CURVE needs both --curve-secret and --curve-server")


def attach(options: argparse.Namespace) -> CoreClient:
    """Connect to the core without loading a tokenizer.

    Raises:
        EngineDeadError: no core answers. ProtocolError: the core has another version. ValueError: a bad address.
    """
    from pagewire.frontend.core.client import CoreClient
    from pagewire.ipc.wire.sockets import CurveKeys, runtime_dir

    keys = None
    if options.curve_secret:
        keys = CurveKeys.load(Path(options.curve_secret), Path(options.curve_server))
    address: str = options.attach
    if "://" not in address:
        if not (path := runtime_dir() / address).exists():
            raise ValueError(
                f"{quoted(address)} must begin with ipc:// or tcp://, or name a socket of a core here"
            )
        address = f"ipc://{path}"

    def ignore(_: object) -> None:
        """Do nothing: this frontend has no requests, and after a lost core the next call raises."""

    return CoreClient.connect(
        address, on_deltas=ignore, on_dead=ignore, curve=keys, peer_uid=options.peer_uid, name="top"
    )
