"""`pagewire route`: the HTTP server on several engine cores of the same model."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.commands.serve import serve, take_server_options
from pagewire.cli.console.engine import FRONTEND_OPTIONS
from pagewire.cli.console.options import (
    add_engine_options,
    add_peer_options,
    engine_args,
    given_options,
    positive,
)
from pagewire.cli.console.parser import UsageError
from pagewire.frontend.route.placement import POLICIES
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.ipc.options.command_line import add_options_of, flag

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM

logger = logging.getLogger("pagewire.server")


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "route",
        help=SUMMARIES["route"],
        description="Serve OpenAI's API over HTTP on several engine cores of the same model. A request goes "
        "where most of its prompt is cached, unless too much waits there. When a core dies, its requests go on "
        "elsewhere. With --enable-admin, /cores lists, adds and drains cores. Otherwise as `pagewire serve`.",
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="same as --model, for --spawn")
    group = parser.add_argument_group("Cores")
    group.add_argument(
        "--core",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a running core (`pagewire core`) at ipc://... or tcp://...; repeat it for each",
    )
    group.add_argument(
        "--spawn",
        type=positive,
        metavar="N",
        help="start N cores of MODEL with the engine options; each is replaced when it dies",
    )
    group.add_argument(
        "--policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="where requests go: by cached prefixes and load, or to each core in turn (default: %(default)s)",
    )
    add_peer_options(group)
    add_options_of(parser, ServerOptions)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the router until it is stopped, or until no core is left.

    Raises:
        EngineDeadError: no core was left for `--reattach-timeout` seconds.
    """
    from pagewire.frontend.api import async_llm
    from pagewire.frontend.server.http.uvicorn_server import bind_socket
    from pagewire.ipc import logs
    from pagewire.ipc.host.descriptors import raise_descriptor_limit
    from pagewire.ipc.host.heap import return_freed_memory
    from pagewire.ipc.host.priority import take_short_turns

    raise_descriptor_limit()
    return_freed_memory()
    take_short_turns()
    check_cores(options)
    server_options = take_server_options(options)
    if server_options.restarts:
        raise UsageError("--restarts has no effect here: a spawned core is replaced as often as it dies")
    os.environ.setdefault("PAGEWIRE_LOGGING_LEVEL", "INFO")  # inherited by spawned cores
    logs.configure(server_options.log_format)
    if not server_options.keyed and not server_options.is_local():
        logger.warning("no API key: whoever can connect to this machine may use the engine (--api-key)")
    with bind_socket(server_options) as listening, opened(options, server_options.reattach_timeout) as engine:
        async_llm.run(serve([engine], server_options, listening))
    return 0


def check_cores(options: argparse.Namespace) -> None:
    """Check that the options name cores in one way, and that none would be ignored.

    Raises:
        UsageError: no cores, or both running and spawned ones; an option that belongs to the other kind.
    """
    if bool(options.core) == bool(options.spawn):
        raise UsageError("give --core ADDRESS once or more, or --spawn N MODEL")
    if len(set(options.core)) < len(options.core):
        raise UsageError("--core: the same address twice")
    if bool(options.curve_secret) != bool(options.curve_server):
        raise UsageError("CURVE needs both --curve-secret and --curve-server")
    if options.spawn:
        if options.curve_secret or options.peer_uid is not None:
            raise UsageError("--curve-secret, --curve-server and --peer-uid need --core")
        return
    flags = [flag(name) for name in given_options(options) if name not in FRONTEND_OPTIONS]
    flags += ["MODEL"] if options.model_tag is not None else []
    if flags:
        raise UsageError(f"{flags[0]} has no effect with --core: set it where the core is started")


@contextmanager
def opened(options: argparse.Namespace, patience: float) -> Iterator[AsyncLLM]:
    """Yield an engine made of the cores that the options name; it is shut down on exit.

    Raises:
        UsageError: a bad option. EngineDeadError: no core can be reached. ValueError: two serve different models.
    """
    from functools import partial

    from pagewire.frontend.media.access import MediaAccess
    from pagewire.frontend.route.engine import open_router
    from pagewire.frontend.route.places import running_place, spawned_place
    from pagewire.ipc.wire.sockets import CurveKeys

    keys = None
    if options.curve_secret:
        keys = CurveKeys.load(Path(options.curve_secret), Path(options.curve_server))
    place_at = partial(running_place, curve=keys, peer_uid=options.peer_uid)
    tokenizer = {"trust_remote_code": getattr(options, "trust_remote_code", False)}
    traces = getattr(options, "otlp_traces_endpoint", None)
    if options.spawn:
        args = engine_args(options)
        places = [spawned_place(args, number, options.spawn) for number in range(options.spawn)]
        tokenizer |= {"token": args.hf_token, "cache_dir": args.download_dir}
        traces = args.otlp_traces_endpoint
    else:
        places = [place_at(address) for address in options.core]
    access = MediaAccess.read(
        getattr(options, "allowed_local_media_path", ""), getattr(options, "allowed_media_domains", None)
    )
    engine = open_router(
        places,
        patience=patience,
        policy=options.policy,
        place_at=place_at,
        traces_endpoint=traces,
        media_access=access,
        **tokenizer,
    )
    try:
        yield engine
    finally:
        engine.shutdown()
