"""Proof that the workers are alive: a recent message of theirs, or the answer to a ping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pagewire.engine_core.calls.worker_calls import PendingCalls
from pagewire.engine_core.workers.group import Outcome, WorkerGroup
from pagewire.engine_core.workers.supervisor import WorkerSupervisor
from pagewire.ipc.environment import env_float
from pagewire.ipc.wire.calls import HealthReport

FRESH_SECONDS = 1.0  # a message of the workers proves that they live for this long: at most one ping a second
LONG_STEPS = 4  # a step is suspect once it takes this many times as long as the longest before

C = TypeVar("C")


class ExaminedEngine(Protocol):
    """The part of the core whose health is examined."""

    worker: WorkerGroup
    supervisor: WorkerSupervisor


class Health(Generic[C]):
    """Answers whether the workers are alive; asks idle ones by a ping.

    answer: called with each caller and the reason why the workers do not count as alive, or None.

    The time that they have is `PAGEWIRE_HEALTH_TIMEOUT_S` (5); a step may take longer if others did.
    """

    def __init__(
        self, core: ExaminedEngine, calls: PendingCalls, answer: Callable[[C, str | None], None]
    ) -> None:
        self._core, self._calls, self._answer = core, calls, answer
        self._seconds = env_float("PAGEWIRE_HEALTH_TIMEOUT_S", 5.0)
        self._waiting: list[C] = []
        self._asked_at = 0.0  # when the first of them asked

    def check(self, caller: C) -> None:
        """Answer a caller, now or within the time limit."""
        if not self._waiting:
            self._asked_at = time.monotonic()
        self._waiting.append(caller)
        self.advance()

    def advance(self) -> None:
        """Answer all callers if the answer is known by now."""
        if not self._waiting:
            return
        known, reason = self._examine(time.monotonic())
        if known:
            waiting, self._waiting = self._waiting, []
            for caller in waiting:
                self._answer(caller, reason)

    def probe(self, now: float) -> None:
        """Ping workers that have sent nothing for a while, so that it is seen if they hang.

        Not those that run a step or a call, which have a time limit anyway.
        """
        worker = self._core.worker
        is_idle = (
            worker.accepting
            and self._core.supervisor.stopwatch.elapsed is None
            and self._calls.oldest is None
        )
        if is_idle and now - worker.last_message > FRESH_SECONDS:
            self._calls.call("ping", {}, ignore)

    def _examine(self, now: float) -> tuple[bool, str | None]:
        """Whether the answer is known, and the answer."""
        worker = self._core.worker
        if self._core.supervisor.is_resting:  # it is asked to have none
            return True, None
        if worker.ready is None:
            return True, f"the worker is starting (start number {worker.num_starts})"
        if (elapsed := self._core.supervisor.stopwatch.elapsed) is not None:
            limit = max(self._seconds, LONG_STEPS * worker.longest_step)
            late = elapsed > limit
            return True, f"a step has been running for {elapsed:.0f} s (limit: {limit:.0f})" if late else None
        if worker.last_sign >= min(self._asked_at, now - FRESH_SECONDS):
            return True, None
        call = self._calls.oldest
        if call is None:
            self._calls.call("ping", {}, ignore)
            return False, None
        if (elapsed := now - max(call.sent_at, worker.last_message)) > self._seconds:
            return True, f"the worker has not answered {call.method} for {elapsed:.0f} s"
        return call.method != "ping", None


def ignore(outcome: Outcome) -> None:
    """Leave the answer of a ping: that it has come is seen in `WorkerGroup.last_sign`."""


def report(problem: str | None, obstacle: str | None) -> HealthReport:
    """The answer of `check_health`. problem: why the workers do not count as alive; obstacle: why requests wait."""
    reason = problem or obstacle
    return {"alive": problem is None, "ready": reason is None, "reason": reason or ""}
