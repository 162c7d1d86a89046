"""Keeps workers running: starts them, kills those that hang, and starts others when they are lost."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.restarts import Restarts
from pagewire.engine_core.workers.stopwatch import Stopwatch
from pagewire.ipc.environment import env_float
from pagewire.ipc.errors import EngineDeadError, error_text

logger = logging.getLogger("pagewire.core")

SPARE_SECONDS = 600.0  # after a restart, in which another process is kept ready: losses come in clusters


class CoreError(EngineDeadError):
    """A failure that ends the core. Its text is the cause that frontends and the log report."""


class WorkerSupervisor:
    """Supervises a group of workers. Time is monotonic, in seconds.

    awaited: tells whether requests or calls wait for workers.

    Attributes:
        stopwatch: of the oldest step in flight. start_limit: seconds that a start may make no progress.
    """

    def __init__(self, worker: WorkerGroup, awaited: Callable[[], bool]) -> None:
        self.stopwatch = Stopwatch(env_float("PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S", 300.0))
        self.start_limit = env_float("PAGEWIRE_WORKER_START_TIMEOUT_S", 300.0)
        self._worker, self._awaited, self._restarts = worker, awaited, Restarts()
        self._spare_until = math.inf

    @property
    def next_start(self) -> float | None:
        """Time of the next start; None if the workers run."""
        return None if self._restarts.running else self._restarts.due(awaited=self._awaited())

    def start(self, now: float) -> str | None:
        """Start the workers. Returns why that failed: what the machine lacks now, it may have a moment later.

        Raises:
            CoreError: too many starts in a row have failed.
        """
        self._restarts.started(now)
        try:
            self._worker.start()
        except (OSError, MemoryError) as error:
            why = error_text(error)
            self.plan_restart(f"the worker cannot be started ({why})", why, now)
            return why
        return None

    def plan_restart(self, text: str, why: str, now: float) -> None:
        """Date the next start, after a loss or a failed start: no step is in flight.

        text: for the log. why: the cause alone.

        Raises:
            CoreError: too many starts in a row have failed.
        """
        self.stopwatch.restart(False)
        self._restarts.lost(now)
        if self._restarts.hopeless:
            raise CoreError(f"the worker did not start: {why}")
        awaited, idle = ((self._restarts.due(awaited=given) or now) - now for given in (True, False))
        when = f", in {awaited:.1f} s if requests wait, else in {idle:g} s" if idle else ""
        logger.error("%s; starting another%s", text, when)

    def ready(self, now: float) -> None:
        """Record that the workers are ready. Once some were lost, others are kept ready for a while.

        They take 100 to 200 MB of a process that has imported PyTorch, which an engine without losses does not pay.
        """
        self._restarts.ready(now)
        if self._worker.num_starts > 1:
            self._worker.start_ahead()
            self._spare_until = now + SPARE_SECONDS

    def check(self, now: float) -> None:
        """Kill workers that hang in a step or in their start, and end those that nothing was lost for."""
        if now >= self._spare_until:
            self._worker.end_ahead()
            self._spare_until = math.inf
        if self.stopwatch.expired:
            logger.error(
                "no result of a step from the worker for over %.0f s; killing it", self.stopwatch.limit
            )
            self.stopwatch.restart(False)
            self._worker.kill()
        if self._worker.silence(now) > self.start_limit:
            text = f"the start of the worker has made no progress for {self.start_limit:g} s"
            if obstacles := self._worker.obstacles:
                text += f": {obstacles}"
            logger.error("%s; killing it (PAGEWIRE_WORKER_START_TIMEOUT_S)", text)
            self._worker.kill(text)
