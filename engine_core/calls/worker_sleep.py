"""The workers' sleep: the calls by which they give memory back and take it again, and what is given back now."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from pagewire.engine_core.calls.frontend_call import FrontendCall
from pagewire.engine_core.calls.worker_calls import PendingCalls
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.wings.wing import Wing
from pagewire.engine_core.workers.group import Outcome, WorkerGroup
from pagewire.engine_core.workers.supervisor import WorkerSupervisor
from pagewire.ipc.errors import EngineAsleepError, EngineBusyError
from pagewire.ipc.wire.worker_messages import Ready

logger = logging.getLogger("pagewire.core")

# What goes with each tag. The KV cache is of no use without the weights, so it is given back with them, and they
# are taken again with it.
GIVEN_BACK_WITH = {"weights": {"weights", "kv_cache"}, "kv_cache": {"kv_cache"}}
TAKEN_WITH = {"weights": {"weights"}, "kv_cache": {"weights", "kv_cache"}}


class WorkerSleep(Wing):
    """Runs the calls `sleep`, `wake_up` and `is_sleeping`.

    supervisor: ends the workers at level 2, and starts others. while_asleep: what becomes of new requests.

    Attributes:
        asleep: what the workers have given back, of "weights" and "kv_cache"; empty while they are awake.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: WorkerGroup,
        worker_calls: PendingCalls,
        supervisor: WorkerSupervisor,
        while_asleep: Literal["wait", "refuse"] = "wait",
    ) -> None:
        self._scheduler, self._worker, self._worker_calls = scheduler, worker, worker_calls
        self._supervisor, self._refuses = supervisor, while_asleep == "refuse"
        self._num_unanswered = 0  # calls that the workers have not answered yet
        self._to_take: list[set[str]] = []  # by each `wake_up` of these
        self.asleep: set[str] = set()

    @property
    def holds_steps(self) -> bool:
        """True while no step may be launched: the workers sleep, or are about to."""
        return bool(self.asleep or self._num_unanswered)

    @property
    def level(self) -> int:
        """0: awake. 1: the workers have given something back. 2: they have ended, or new ones start."""
        return 2 if self._supervisor.is_resting else int(bool(self.asleep))

    def check_submit(self) -> None:
        """Check that requests are taken now.

        Raises:
            EngineAsleepError: the engine sleeps, and is told to refuse them.
        """
        if self._refuses and self.asleep:
            raise EngineAsleepError(
                "the engine sleeps, and refuses requests until it is woken (while_asleep)"
            )

    def check_workers(self, method: str) -> None:
        """Check that there are workers, or will be, which can run a call.

        Raises:
            EngineAsleepError: the engine sleeps at level 2.
        """
        if self._supervisor.is_resting and not self._to_take:
            raise no_workers(method)

    def worker_ready(self, ready: Ready) -> None:
        """Put new workers to sleep if the lost ones slept; what is about to be taken again they keep."""

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                logger.error("the new worker does not sleep as the lost one did: %s", outcome)

        if given_back := self.asleep.difference(*self._to_take):
            self._worker_calls.call_first("sleep", {"level": 1, "tags": sorted(given_back)}, done)

    def sleep(self, caller: FrontendCall, level: int, tags: list[str] | None) -> None:
        """Let the workers give memory back, and at level 2 end them.

        If one fails, what it still holds is unknown, and all are replaced.

        Raises:
            EngineBusyError: requests are unfinished. ValueError: an unknown tag, or some at level 2.
        """
        given_back = parts_of("sleep", tags, GIVEN_BACK_WITH)
        if level == 2 and tags is not None:
            raise ValueError("sleep: level 2 ends the workers, so it takes no tags")
        if self._scheduler.num_unfinished:
            raise EngineBusyError(f"{self._scheduler.num_unfinished} requests are unfinished")
        if self._supervisor.is_resting and not self._to_take:
            return caller.reply(None)

        def done(outcome: Outcome) -> None:
            self._num_unanswered -= 1
            if isinstance(outcome, EngineAsleepError):  # a call before this one has ended them
                return caller.reply(None)
            if isinstance(outcome, Exception):
                self._worker.kill()
                return caller.refuse(outcome)
            self.asleep |= given_back
            self._scheduler.reset_prefix_cache()
            self._scheduler.kv.lose()  # what was encoded is gone with the keys and values
            if level == 2:
                self._end_workers()
            caller.reply(None)

        self._worker_calls.call("sleep", {"level": level, "tags": tags}, done)
        self._num_unanswered += 1

    def _end_workers(self) -> None:
        """End the workers; start others at once if a `wake_up` waits already."""
        self._supervisor.rest()
        if self._to_take:
            self._supervisor.wake()
        else:
            self._worker_calls.refuse_unsent(no_workers)

    def wake_up(self, caller: FrontendCall, tags: list[str] | None) -> None:
        """Let the workers take memory again, and start them if they have ended; after an error it still counts as
        asleep.

        Raises:
            ValueError: an unknown tag, or an empty list.
        """
        taken = parts_of("wake_up", tags, TAKEN_WITH)

        def done(outcome: Outcome) -> None:
            self._num_unanswered -= 1
            self._to_take.remove(taken)
            if isinstance(outcome, Exception):
                return caller.refuse(outcome)
            self.asleep -= taken
            caller.reply(None)

        if not self.holds_steps:
            return caller.reply(None)
        self._worker_calls.call("wake_up", {"tags": tags}, done)
        self._num_unanswered += 1
        self._to_take.append(taken)
        if self._supervisor.is_resting:
            self._supervisor.wake()

    def is_sleeping(self, caller: FrontendCall) -> None:
        """Answer whether the workers have given memory back, and not taken all of it again."""
        caller.reply(bool(self.asleep))


def parts_of(method: str, tags: list[str] | None, parts: Mapping[str, set[str]]) -> set[str]:
    """The parts of memory that the tags of a call stand for; None stands for all.

    Raises:
        ValueError: an unknown tag, or an empty list.
    """
    names = list(parts) if tags is None else tags
    if not names or set(names) - parts.keys():
        raise ValueError(f"{method}: tags must name weights, kv_cache or both, got {tags}")
    return {part for name in names for part in parts[name]}


def no_workers(method: str) -> EngineAsleepError:
    """The error of a call that needs workers, after `sleep(2)`."""
    return EngineAsleepError(
        f"{method}: the engine sleeps at level 2 and has no workers; wake_up comes first"
    )
