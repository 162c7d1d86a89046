"""Cores that a session spawns, and the tokenizer that it loads while one starts.

A frontend that attaches does not import this, nor the options of an engine.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pagewire.frontend.core.core_source import Attached, CoreProcess, Dial, Pauses
from pagewire.frontend.core.link import START_ERRORS
from pagewire.frontend.core.spawn import spawn_core
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.files.hub import EMBEDDED, model_folder
from pagewire.ipc.options.engine_args import EngineArgs

logger = logging.getLogger("pagewire.frontend")


class SpawnedCores:
    """Spawns a core from options. restarts: how many cores may replace one that was lost."""

    def __init__(self, args: EngineArgs, restarts: int) -> None:
        self._args, self._restarts_left = args, restarts
        self._pauses = Pauses()

    def connect(self, dial: Dial) -> Attached:
        """Spawn a core, and wait until it is ready."""
        spawned = spawn_core(self._args)
        try:
            return self.again(dial, spawned)
        except BaseException:
            spawned.shutdown()
            raise

    def replace(self, dial: Dial, error: EngineDeadError, closing: threading.Event) -> Attached:
        """Spawn another core; one that does not start counts as a restart, too."""
        cause = error
        while self._restarts_left > 0:
            self._restarts_left -= 1
            pause = self._pauses.next()
            when = f" in {pause:g} s" if pause else ""
            message = "%s; starting another core%s (restarts left after this one: %d)"
            logger.error(message, cause, when, self._restarts_left)
            if closing.wait(pause):
                break
            try:
                return self.connect(dial)
            except (EngineDeadError, *START_ERRORS) as failure:
                cause = EngineDeadError(f"{error}; another core did not start: {failure}")
        raise cause

    def again(self, dial: Dial, spawned: CoreProcess | None) -> Attached:
        """Attach to the spawned core."""
        assert spawned is not None
        return Attached(
            dial(spawned.address, child=spawned.child, name="owner", timeout=None),
            spawned,
        )


def tokenizer_source(args: EngineArgs) -> dict[str, Any]:
    """The options of `load_tokenizer` that an engine's options have."""
    return {
        "token": args.hf_token,
        "cache_dir": args.download_dir,
        "trust_remote_code": args.trust_remote_code,
    }


def tokenizer_ahead(args: EngineArgs, source: dict[str, Any]) -> Future[Tokenizer] | None:
    """Load the tokenizer that the core of these options will name, while that core starts.

    None if there is nothing to load, or if it is no folder or file yet, which the core downloads.
    source: further options of `load_tokenizer`, whose errors the future has.
    """
    name = args.tokenizer or args.model
    is_here = name in EMBEDDED or os.path.exists(name)  # noqa: PTH110 - Path.exists fails for a name that is too long
    if args.skip_tokenizer_init or args.tokenizer_revision is not None or not is_here:
        return None

    def load() -> Tokenizer:
        folder = args.tokenizer or model_folder(args.model, load_format=args.load_format)
        return load_tokenizer(folder, args.tokenizer_mode, **source)

    threads = ThreadPoolExecutor(1, "tokenizer")
    future = threads.submit(load)
    threads.shutdown(wait=False)
    return future
