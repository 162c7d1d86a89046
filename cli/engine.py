"""The engine that a command talks to: its own, or one that runs already."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.cli.options import engine_args

if TYPE_CHECKING:
    from pagewire.frontend.async_llm import AsyncLLM


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[AsyncLLM]:
    """Attach to `--attach`, or spawn a core with the engine options; closed at the end.

    A spawned core logs warnings only, unless `PAGEWIRE_LOGGING_LEVEL` says otherwise.

    Raises:
        UsageError: a bad option. EngineDeadError, ModelNotFoundError: why there is no engine.
    """
    from pagewire.frontend.async_llm import AsyncLLM
    from pagewire.ipc.sockets import CurveKeys

    if options.attach:
        keys = None
        if options.curve_secret:
            server = Path(options.curve_server) if options.curve_server else None
            keys = CurveKeys.load(Path(options.curve_secret), server)
        engine = AsyncLLM.attach(options.attach, curve=keys)
    else:
        os.environ.setdefault("PAGEWIRE_LOGGING_LEVEL", "WARNING")
        engine = AsyncLLM.from_engine_args(engine_args(options))
    try:
        yield engine
    finally:
        engine.shutdown()
