"""Cores that a session spawns. A frontend that attaches does not import this, nor the options of an engine."""

from __future__ import annotations

import logging
import threading

from pagewire.frontend.core.core_source import Attached, Dial, Pauses
from pagewire.frontend.core.link import START_ERRORS
from pagewire.frontend.core.spawn import SpawnedCore, spawn_core
from pagewire.ipc.errors import EngineDeadError
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

    def again(self, dial: Dial, spawned: SpawnedCore | None) -> Attached:
        """Attach to the spawned core."""
        assert spawned is not None
        return Attached(
            dial(spawned.address, child=spawned.child, name="owner", timeout=None),
            spawned,
        )
