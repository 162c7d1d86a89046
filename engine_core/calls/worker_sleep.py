"""The workers' sleep: the calls by which they give memory back and take it again, and what is given back now."""

from __future__ import annotations

import logging

from pagewire.engine_core.calls.frontend_call import FrontendCall
from pagewire.engine_core.calls.worker_calls import PendingCalls
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.workers.group import Outcome, WorkerGroup
from pagewire.ipc.errors import EngineBusyError

logger = logging.getLogger("pagewire.core")

# What the workers give back at each level of sleep. The KV cache is of no use without the weights, so `wake_up`
# takes both for the cache.
GIVEN_BACK = {1: {"kv_cache"}, 2: {"weights", "kv_cache"}}
WOKEN_WITH = {"weights": {"weights"}, "kv_cache": {"weights", "kv_cache"}}


class WorkerSleep:
    """Runs the calls `sleep`, `wake_up` and `is_sleeping`.

    Attributes:
        asleep: what the workers have given back, of "weights" and "kv_cache"; empty while they are awake.
    """

    def __init__(self, scheduler: Scheduler, worker: WorkerGroup, worker_calls: PendingCalls) -> None:
        self._scheduler, self._worker, self._worker_calls = scheduler, worker, worker_calls
        self._num_unanswered = 0  # calls that the workers have not answered yet
        self.asleep: set[str] = set()

    @property
    def holds_steps(self) -> bool:
        """True while no step may be launched: the workers sleep, or are about to."""
        return bool(self.asleep or self._num_unanswered)

    def worker_ready(self) -> None:
        """Put new workers to sleep if the lost ones slept."""

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                logger.error("the new worker does not sleep as the lost one did: %s", outcome)

        if self.asleep:
            level = min(level for level, parts in GIVEN_BACK.items() if self.asleep <= parts)
            self._worker_calls.call_first("sleep", {"level": level}, done)

    def sleep(self, caller: FrontendCall, level: int) -> None:
        """Let the workers give memory back; if one fails, what it still holds is unknown, and all are replaced.

        Raises:
            EngineBusyError: requests are unfinished.
        """
        if self._scheduler.num_unfinished:
            raise EngineBusyError(f"{self._scheduler.num_unfinished} requests are unfinished")

        def done(outcome: Outcome) -> None:
            self._num_unanswered -= 1
            if isinstance(outcome, Exception):
                self._worker.kill()
                return caller.refuse(outcome)
            self.asleep |= GIVEN_BACK[level]
            self._scheduler.reset_prefix_cache()
            self._scheduler.kv.lose()  # what was encoded is gone with the keys and values
            caller.reply(None)

        self._worker_calls.call("sleep", {"level": level}, done)
        self._num_unanswered += 1

    def wake_up(self, caller: FrontendCall, tags: list[str] | None) -> None:
        """Let the workers take memory again; after an error it still counts as asleep.

        Raises:
            ValueError: an unknown tag, or an empty list.
        """
        names = WOKEN_WITH.keys() if tags is None else set(tags)
        if not names or names - WOKEN_WITH.keys():
            raise ValueError(f"wake_up: tags must name weights, kv_cache or both, got {tags}")

        def done(outcome: Outcome) -> None:
            self._num_unanswered -= 1
            if isinstance(outcome, Exception):
                return caller.refuse(outcome)
            self.asleep.difference_update(*(WOKEN_WITH[name] for name in names))
            caller.reply(None)

        if not self.holds_steps:
            return caller.reply(None)
        self._worker_calls.call("wake_up", {"tags": tags}, done)
        self._num_unanswered += 1

    def is_sleeping(self, caller: FrontendCall) -> None:
        """Answer whether the workers have given memory back, and not taken all of it again."""
        caller.reply(bool(self.asleep))
