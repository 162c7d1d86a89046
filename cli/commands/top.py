"""`pagewire top`: what a running core does, for whom, and how fast."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.cli.commands.core import DEFAULT_NAME
from pagewire.cli.commands.top_look import lines, look_twice
from pagewire.cli.options import UsageError, add_curve_options

if TYPE_CHECKING:
    from pagewire.frontend.client import CoreClient


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "top",
        help="watch a running core: its frontends, requests and speed",
        description="Watch a running core. Keys: a ends the selected request, p pauses and resumes the engine, "
        "s sorts, q quits. With --once or --json, print one look and end.",
    )
    group = parser.add_argument_group("Attaching")
    group.add_argument(
        "--attach", metavar="ADDRESS", help="ipc://... or tcp://... (default: that of `pagewire core`)"
    )
    add_curve_options(group)
    parser.add_argument(
        "--interval",
        type=interval,
        default=1.0,
        metavar="FLOAT",
        help="seconds between two looks (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one look as text")
    parser.add_argument("--json", action="store_true", help="print one look as JSON")
    parser.set_defaults(run=run)


def interval(text: str) -> float:
    """A span of time that is not too short."""
    if not (value := float(text)) >= 0.1:
        raise argparse.ArgumentTypeError(f"must be 0.1 or more, got {text}")
    return value


def run(options: argparse.Namespace) -> int:
    """Watch until the user has enough, or look once."""
    once = options.once or options.json
    if not once:
        check_terminal()
    client = attach(options)
    try:
        if once:
            look = look_twice(client, options.interval)
            print(json.dumps(look.as_dict()) if options.json else "\n".join(lines(look)))
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
    """Before anything is started.

    Raises:
        UsageError: there is no terminal, or no library for it.
    """
    try:
        import textual  # noqa: F401
    except ImportError:
        raise UsageError("the live view needs textual: pip install 'pagewire[top]'; or use --once") from None
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()):
        raise UsageError("the live view needs a terminal; use --once or --json")


def attach(options: argparse.Namespace) -> CoreClient:
    """A connection to the core; no tokenizer is loaded.

    Raises:
        EngineDeadError: nobody answers. ProtocolError: another version. ValueError: a bad address.
        UsageError: half of CURVE.
    """
    from pagewire.frontend.client import CoreClient
    from pagewire.ipc.sockets import CurveKeys, private_address

    if bool(options.curve_secret) != bool(options.curve_server):
        raise UsageError("CURVE needs both --curve-secret and --curve-server")
    keys = None
    if options.curve_secret:
        keys = CurveKeys.load(Path(options.curve_secret), Path(options.curve_server))
    address = options.attach or private_address(DEFAULT_NAME)

    def ignore(_: object) -> None:
        """We have no requests; that the core is lost, the next call tells."""

    return CoreClient.connect(address, on_deltas=ignore, on_dead=ignore, curve=keys, name="top")
