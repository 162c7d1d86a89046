"""The engine that a command uses: a core of its own, or one that runs already."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.cli.console.options import engine_args, given_options
from pagewire.cli.console.parser import UsageError
from pagewire.ipc.options.command_line import flag

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM

FRONTEND_OPTIONS = (
    "allowed_local_media_path",
    "allowed_media_domains",
    "seed",
    "otlp_traces_endpoint",
    "trust_remote_code",
)  # engine options that a frontend uses too


@contextmanager
def opened(
    options: argparse.Namespace, restarts: int = 0, reattach_timeout: float = 0.0
) -> Iterator[AsyncLLM]:
    """Yield an engine: attached to the core at `--attach`, or with a core spawned from the engine options.

    The engine is shut down on exit. This process and a spawned core log warnings only, unless
    `PAGEWIRE_LOGGING_LEVEL` is set.

    Args:
        restarts: how often a spawned core that dies is replaced.
        reattach_timeout: seconds to wait for another core at the address when an attached core dies.

    Raises:
        UsageError: a bad option. EngineDeadError: the core cannot be reached, or failed while it started.
        ValueError: the model cannot be loaded. ModelNotFoundError: there is no such model.
    """
    from pagewire.frontend.api.async_llm import AsyncLLM
    from pagewire.ipc import logs

    os.environ.setdefault("PAGEWIRE_LOGGING_LEVEL", "WARNING")
    logs.configure()
    check_attachment(options)
    with ExitStack() as stack:
        if options.attach:
            engine = attached(options, reattach_timeout)
        else:
            from pagewire.cli.console.first_start import without_waiting

            args = engine_args(options)
            stack.enter_context(without_waiting(options, args))
            engine = AsyncLLM.from_engine_args(args, restarts=restarts)
        stack.callback(engine.shutdown)
        yield engine


def attached(options: argparse.Namespace, reattach_timeout: float) -> AsyncLLM:
    """Attach to the core at `--attach`.

    Raises:
        see `opened`.
    """
    from pagewire.frontend.api.async_llm import AsyncLLM
    from pagewire.ipc.wire.sockets import CurveKeys

    keys = None
    if options.curve_secret:
        keys = CurveKeys.load(Path(options.curve_secret), Path(options.curve_server))
    return AsyncLLM.attach(
        options.attach,
        curve=keys,
        name=options.command,
        otlp_traces_endpoint=getattr(options, "otlp_traces_endpoint", None),
        reattach_timeout=reattach_timeout,
        peer_uid=options.peer_uid,
        trust_remote_code=getattr(options, "trust_remote_code", False),
        allowed_local_media_path=getattr(options, "allowed_local_media_path", ""),
        allowed_media_domains=getattr(options, "allowed_media_domains", None),
    )


def check_attachment(options: argparse.Namespace) -> None:
    """Check that no option is given that would be ignored.

    Ignoring a CURVE option silently would leave a user believing that the connection is encrypted.

    Raises:
        UsageError: engine options with `--attach`, CURVE options or `--peer-uid` without it, or one
            CURVE file of two.
    """
    if bool(options.curve_secret) != bool(options.curve_server):
        raise UsageError("CURVE needs both --curve-secret and --curve-server")
    if not options.attach:
        if options.curve_secret:
            raise UsageError("--curve-secret and --curve-server need --attach")
        if options.peer_uid is not None:
            raise UsageError("--peer-uid needs --attach")
        return
    flags = [flag(name) for name in given_options(options) if name not in FRONTEND_OPTIONS]
    if options.config is not None:
        flags.append("--config")
    if flags:
        raise UsageError(f"{flags[0]} has no effect with --attach: set it where the core is started")
