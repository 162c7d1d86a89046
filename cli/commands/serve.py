"""`pagewire serve`: the HTTP server, on an engine core that it spawns or on one that runs already."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.engine import opened
from pagewire.cli.console.models_on_demand import NAMES as SHELF_NAMES
from pagewire.cli.console.models_on_demand import (
    capacity_of,
    estimated,
    models_on_demand,
    options_of,
    take_shelf_options,
)
from pagewire.cli.console.options import (
    add_attach_options,
    add_engine_options,
    check_config,
    read_file,
)
from pagewire.cli.console.parser import UsageError
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.shelf.options import ShelfOptions
from pagewire.ipc.compatibility import OPTIONS
from pagewire.ipc.options.command_line import add_options_of, flag
from pagewire.ipc.quoting import quoted

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM
    from pagewire.ipc.options.engine_args import EngineArgs

logger = logging.getLogger("pagewire.server")

# For clients to get the error of their open requests, and for new requests to be answered with 503, when the engine
# core is lost for good.
GRACE_SECONDS = 3.0
TIDY_SECONDS = 1.0
NAMES = frozenset(field.name for field in dataclasses.fields(ServerOptions))


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help=SUMMARIES["serve"],
        description="Serve a model over HTTP until SIGTERM or SIGINT: open requests then finish and new ones are "
        "refused; a second signal ends it at once. Prints 'ready URL' on standard output once it listens. If the "
        "engine core is lost for good, the server ends with status 1.",
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument(
        "more_models",
        nargs="*",
        metavar="MODEL",
        help="further models; of several, each is loaded at the first request for it",
    )
    add_attach_options(parser, several=True)
    parser.add_argument(
        "--also",
        metavar="MODEL",
        action="append",
        default=[],
        help="serve another model under the same address, by its name; may be repeated. With "
        'engine options: JSON such as {"model": "MODEL", "dtype": "float32"}',
    )
    add_options_of(parser, ServerOptions)
    add_options_of(parser, ShelfOptions)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the server until it is stopped, or until its engine core is lost for good.

    Raises:
        EngineDeadError: the engine core was lost.
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
    models, shelf_options = take_models(options)
    server_options = take_server_options(options, needs_model=not shelf_options.pulled)
    os.environ.setdefault("PAGEWIRE_LOGGING_LEVEL", "INFO")  # inherited by a spawned core
    logs.configure(server_options.log_format)
    if not server_options.keyed and not server_options.is_local():
        logger.warning("no API key: whoever can connect to this machine may use the engine (--api-key)")
    more = [also_options(text) for text in options.also]
    if models or shelf_options.pulled:
        pulled = (lambda name: options_of(options, {"model": name})) if shelf_options.pulled else None
        check_shelf(server_options, len(models) + shelf_options.pulled)
        with bind_socket(server_options) as listening:
            async_llm.run(serve_shelf(models, shelf_options, server_options, listening, pulled))
        return 0
    with bind_socket(server_options) as listening, ExitStack() as stack:
        engines = [
            stack.enter_context(opened(own, server_options.restarts, server_options.reattach_timeout))
            for own in [*each_core(options), *more]
        ]
        async_llm.run(serve(engines, server_options, listening))
    return 0


def take_models(options: argparse.Namespace) -> tuple[dict[str, EngineArgs], ShelfOptions]:
    """Return the models that are loaded on demand, if there are any, and the options of that.

    `options` then name one of them as the model.

    Raises:
        UsageError: a bad option.
    """
    tags, file = [*filter(None, [options.model_tag]), *options.more_models], read_file(options.config)
    shelf_options = take_shelf_options(options, file)
    engine = {name: value for name, value in file.items() if name not in NAMES | SHELF_NAMES}
    shared = {**engine, **vars(options)}
    models = models_on_demand(tags, shelf_options, argparse.Namespace(**shared))
    if (models or shelf_options.pulled) and (options.attach or options.also):
        what = "--attach" if options.attach else "--also"
        raise UsageError(f"{what} has no effect with models that are loaded on demand: name them as MODEL")
    if models:
        options.model, options.model_tag = next(iter(models.values())).model, None
    return models, shelf_options


def check_shelf(server_options: ServerOptions, num_models: int) -> None:
    """Check that no option that is for one model is given for several.

    Raises:
        UsageError: one is.
    """
    if num_models == 1:
        return
    from pagewire.frontend.server.serving.service import OF_THE_FIRST

    default = ServerOptions()
    for name in OF_THE_FIRST:
        if getattr(server_options, name) != getattr(default, name):
            raise UsageError(f"{flag(name)} is for one model, and these are {num_models}")


def each_core(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of each engine of the command line, but for those of `--also`."""
    return [argparse.Namespace(**vars(options) | {"attach": place}) for place in options.attach or [None]]


def also_options(text: str) -> argparse.Namespace:
    """The options of an engine that `--also` names: a model, or engine options as JSON.

    Raises:
        UsageError: they are no options, or name no model.
    """
    try:
        values = json.loads(text) if text.lstrip().startswith("{") else {"model": text}
    except ValueError as error:
        raise UsageError(f"--also: not valid JSON: {error}") from None
    if not isinstance(values.get("model"), str):
        raise UsageError(f"--also: a model is missing in {quoted(text)}")
    check_config("--also", values)
    attach: dict[str, Any] = {"attach": None, "peer_uid": None, "curve_secret": None, "curve_server": None}
    return argparse.Namespace(command="serve", config=None, **attach, **values)


async def serve(engines: Sequence[AsyncLLM], options: ServerOptions, listening: socket.socket) -> None:
    """Serve engines on a listening socket until stopped.

    Raises:
        EngineDeadError: an engine core was lost for good, and the server does not keep alive without it.
        UsageError: two models have the same name.
    """
    import asyncio

    from pagewire.frontend.server.http.uvicorn_server import HTTPServer, url_of
    from pagewire.frontend.server.wiring import create_app
    from pagewire.ipc.host.heap import freeze_heap

    def ready() -> None:
        freeze_heap()
        print(f"ready {url_of(listening, options)}", flush=True)

    try:
        app = create_app(engines[0], options, engines[1:])
    except ValueError as error:
        raise UsageError(str(error)) from error
    server = HTTPServer(app, options, ready)
    tidying = asyncio.create_task(tidy_heap())
    if options.keeps_alive():
        await server.serve(sockets=[listening])
        tidying.cancel()
        return
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    gone = [asyncio.wrap_future(engine.session.gone) for engine in engines]
    waiting: list[asyncio.Future[Any]] = [serving, *gone]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        await asyncio.wait((serving,), timeout=GRACE_SECONDS)
        server.should_exit = True
    await serving
    tidying.cancel()
    for loss in gone:
        if loss.done():
            raise loss.result()


async def serve_shelf(
    models: Mapping[str, EngineArgs],
    shelf_options: ShelfOptions,
    options: ServerOptions,
    listening: socket.socket,
    pulled: Callable[[str], EngineArgs] | None,
) -> None:
    """Serve models that are loaded on demand, until stopped. pulled: see `open_shelf`."""
    import asyncio

    from pagewire.frontend.server.http.uvicorn_server import HTTPServer, url_of
    from pagewire.frontend.server.shelf.opening import open_shelf
    from pagewire.frontend.server.wiring import application
    from pagewire.ipc.host.heap import freeze_heap

    def ready() -> None:
        freeze_heap()
        print(f"ready {url_of(listening, options)}", flush=True)

    capacity = capacity_of(shelf_options)
    services = open_shelf(
        models, shelf_options, options, capacity, partial(estimated, capacity, shelf_options.fit), pulled
    )
    tidying = asyncio.create_task(tidy_heap())
    try:
        await HTTPServer(application(services), options, ready).serve(sockets=[listening])
    finally:
        tidying.cancel()
        await services.close()


async def tidy_heap() -> None:
    """Give spare memory back to the system every `TIDY_SECONDS`: large bodies and answers leave much of it."""
    import asyncio

    from pagewire.ipc.host.heap import release_spare_memory

    while True:
        await asyncio.sleep(TIDY_SECONDS)
        release_spare_memory()


def take_server_options(options: argparse.Namespace, needs_model: bool = True) -> ServerOptions:
    """Return the server's options. The command line overrides the file, and the file the defaults.

    The file's engine options are added to `options`, and its `config` is cleared.

    Raises:
        UsageError: no model or two are given, the file cannot be read, or an option is unknown or has a bad value.
    """
    if options.model_tag is not None:
        if hasattr(options, "model"):
            raise UsageError("give MODEL or --model, not both")
        options.model = options.model_tag
    values = read_file(options.config)
    if options.command == "serve":
        values = {name: value for name, value in values.items() if name not in SHELF_NAMES}
    given = {name: value for name, value in values.items() if name in NAMES}
    engine = {name: value for name, value in values.items() if name not in NAMES}
    check_config(options.config, {name: value for name, value in engine.items() if name not in OPTIONS})
    for name, value in engine.items():
        if not hasattr(options, name):
            setattr(options, name, value)
    options.config = None
    attaching = "--core" if options.command == "route" else "--attach"
    attaches = getattr(options, attaching.strip("-"))
    if needs_model and not attaches and not hasattr(options, "model"):
        raise UsageError(f"give a MODEL, such as demo, or {attaching} ADDRESS")
    given |= {name: value for name, value in vars(options).items() if name in NAMES}
    try:
        server_options = ServerOptions(**{name: as_list(name, value) for name, value in given.items()})
        server_options.check()
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    if server_options.restarts and attaches:
        raise UsageError(f"--restarts has no effect with {attaching}: only a spawned core can be restarted")
    return server_options


def as_list(name: str, value: Any) -> Any:
    """Return a list option's values, which may be given as a JSON array: '["GET", "POST"]'.

    Raises:
        ValueError: the value begins with "[" and is not valid JSON.
    """
    if not (isinstance(value, list) and len(value) == 1 and str(value[0]).startswith("[")):
        return value
    try:
        return json.loads(value[0])
    except ValueError as error:
        raise ValueError(f"{name}: {value[0]!r} is not valid JSON: {error}") from None
