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
        num_wakes: starts that no loss was the cause of, but `wake`.
    """

    def __init__(self, worker: WorkerGroup, awaited: Callable[[], bool]) -> None:
        self.stopwatch = Stopwatch(env_float("PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S", 300.0))
        self.start_limit = env_float("PAGEWIRE_WORKER_START_TIMEOUT_S", 300.0)
        self._worker, self._awaited, self._restarts = worker, awaited, Restarts()
        self._spare_until = math.inf
        self._rests = False  # no workers are to run
        self._ends = False  # those that run were ended by `rest`, and are not reaped yet
        self._wakes = False  # from `wake` until workers are ready, or lost before that
        self.num_wakes = 0

    @property
    def next_start(self) -> float | None:
        """Time of the next start; None if the workers run, or are not to."""
        if self._rests or self._restarts.running:
            return None
        return self._restarts.due(awaited=self._awaited())

    def start(self, now: float) -> str | None:
        """Start the workers. Returns why that failed: what the machine lacks now, it may have a moment later.

        Raises:
            CoreError: too many starts in a row have failed.
        """
        self._restarts.started(now)
        self.num_wakes += self._wakes
        try:
            self._worker.start()
        except (OSError, MemoryError) as error:
            why = error_text(error)
            if not self.has_rested(why, now):
                self.plan_restart(f"the worker cannot be started ({why})", why, now)
            return why
        return None

    # ------------------------------------------------------------ without workers

    @property
    def is_resting(self) -> bool:
        """True from `rest` until workers are ready again."""
        return self._rests or self._wakes

    @property
    def is_waking(self) -> bool:
        """True while the workers that run, or start next, are those of `wake`, and not ready."""
        return self._wakes and not self._ends

    def rest(self) -> None:
        """End the workers, which run nothing, and start no others before `wake`."""
        self._rests, self._wakes, self._ends = True, False, True
        self._worker.end_ahead()
        self._spare_until = math.inf
        self._worker.kill()

    def wake(self) -> None:
        """Start workers again, as soon as those before have ended. If that fails, none are started any more."""
        if self._rests:
            self._rests, self._wakes = False, True

    def has_rested(self, why: str, now: float) -> bool:
        """True if the workers that are lost are not to be replaced: they were ended, or could not be woken.

        why: the cause, for the log.
        """
        if self._ends:
            self._ends = False
            logger.info("the workers have ended: the engine sleeps")
        elif self._wakes:
            self._rests, self._wakes = True, False
            logger.error("the engine cannot be woken, and still sleeps: %s", why)
        else:
            return False
        self._restarts.rested(now)
        return True

    # ------------------------------------------------------------ losses

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
        if self._wakes:
            self._wakes = False
        elif self._worker.num_starts > 1:
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
