"""Steps between scheduler and workers: plans and grammar masks are sent, results are committed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection

from pagewire.engine_core.clients.outbox import DeltaOutbox
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.wings.wing import Wing
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.stopwatch import Stopwatch
from pagewire.ipc.wire.steps import StepPlan, StepResult, Way
from pagewire.ipc.wire.tasks import name_tasks_once

logger = logging.getLogger("pagewire.core")


class StepDriver:
    """Keeps the workers busy with the scheduler's plans.

    stopwatch: restarted for each step that becomes the oldest in flight. outbox: gets the deltas.
    wings: may send messages before plans, and learn from results.

    Attributes:
        busy_us: microseconds in which the workers ran steps. idle_us: those between, while there were requests.
        by_way: steps by what ran them in the workers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: WorkerGroup,
        stopwatch: Stopwatch,
        outbox: DeltaOutbox,
        wings: Collection[Wing] = (),
    ) -> None:
        self._scheduler, self._worker, self._stopwatch = scheduler, worker, stopwatch
        self._outbox, self._wings = outbox, wings
        self._was_busy = False
        self.busy_us = self.idle_us = 0
        self.by_way: Counter[Way] = Counter()

    def launch(self) -> None:
        """Send plans until as many steps are in flight as may be, or there is nothing to run."""
        scheduler = self._scheduler
        while (
            self._worker.accepting
            and len(scheduler.in_flight) < scheduler.config.depth
            and (plan := self._plan()) is not None
        ):
            if len(scheduler.in_flight) == 1:
                self._stopwatch.restart(True)
            name_tasks_once(plan.inits)
            self._worker.send(plan)
            if len(scheduler.in_flight) == 1:
                self._send_masks(time.monotonic())

    def _plan(self) -> StepPlan | None:
        """The next plan, if there is one."""
        plan = self._scheduler.plan(time.monotonic())
        for wing in self._wings:
            wing.planned()
        return plan

    def commit(self, result: StepResult) -> None:
        """Take the result of the oldest step in flight. Workers whose result is of another step are killed."""
        now, scheduler = time.monotonic(), self._scheduler
        step = scheduler.in_flight[0] if scheduler.in_flight else None
        try:
            outcomes = scheduler.commit(result, now)
        except ValueError as error:
            logger.error("unexpected step result from the worker, killing it: %s", error)
            self._worker.kill()
            return
        assert step is not None, "a result of no step is unexpected"
        self._outbox.add_step(outcomes)
        self._send_masks(now)
        self._stopwatch.restart(bool(scheduler.in_flight))
        self.busy_us += result.worker_us
        self.by_way[result.way] += step.num_run(result)
        self.idle_us += result.idle_us if self._was_busy else 0
        self._was_busy = scheduler.num_unfinished > 0
        for wing in self._wings:
            wing.committed(step, result, outcomes, now)

    def _send_masks(self, now: float) -> None:
        """Send the grammar masks of the oldest step in flight, if it needs any; all earlier tokens are known."""
        masks, outcomes = self._scheduler.masks(now)
        self._outbox.add(outcomes)
        if masks is not None:
            self._worker.send(masks)
