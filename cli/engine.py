"""The engine that a command talks to: its own, or one that runs already."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.cli.options import UsageError, engine_args, flag, given_options

if TYPE_CHECKING:
    from pagewire.frontend.async_llm import AsyncLLM

OURS = ("seed", "otlp_traces_endpoint")  # options of an engine that are a frontend's affair, too


@contextmanager
def opened(
    options: argparse.Namespace, restarts: int = 0, reattach_timeout: float = 0.0
) -> Iterator[AsyncLLM]:
    """Attach to `--attach`, or spawn a core with the engine options; closed at the end.

    restarts: how often to replace a spawned core that dies. reattach_timeout: how long to wait for another where
    one that was attached to dies, see `AsyncLLM.attach`.
    We, and a spawned core, log warnings only, unless `PAGEWIRE_LOGGING_LEVEL` says otherwise.

    Raises:
        UsageError: a bad option. EngineDeadError, ModelNotFoundError: why there is no engine.
    """
    from pagewire.frontend.async_llm import AsyncLLM
    from pagewire.ipc import logs
    from pagewire.ipc.sockets import CurveKeys

    check_attachment(options)
    os.environ.setdefault("PAGEWIRE_LOGGING_LEVEL", "WARNING")
    logs.configure()
    if options.attach:
        keys = None
        if options.curve_secret:
            keys = CurveKeys.load(Path(options.curve_secret), Path(options.curve_server))
        traces = getattr(options, "otlp_traces_endpoint", None)
        engine = AsyncLLM.attach(
            options.attach,
            curve=keys,
            name=options.command,
            otlp_traces_endpoint=traces,
            reattach_timeout=reattach_timeout,
        )
    else:
        engine = AsyncLLM.from_engine_args(engine_args(options), restarts=restarts)
    try:
        yield engine
    finally:
        engine.shutdown()


def check_attachment(options: argparse.Namespace) -> None:
    """Refuse what would have no effect; for encryption, that could be mistaken for having it.

    Raises:
        UsageError: engine options with `--attach`, CURVE without it, or half of CURVE.
    """
    if bool(options.curve_secret) != bool(options.curve_server):
        raise UsageError("CURVE needs both --curve-secret and --curve-server")
    if not options.attach:
        if options.curve_secret:
            raise UsageError("--curve-secret and --curve-server are for --attach")
        return
    flags = [flag(name) for name in given_options(options) if name not in OURS]
    if options.config is not None:
        flags.append("--config")
    if flags:
        raise UsageError(f"{flags[0]} has no effect with --attach: it is for the core to say")
