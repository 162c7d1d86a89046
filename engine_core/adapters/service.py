"""The adapters of an engine, in the core's loop: what workers read, and what waits for it."""

from __future__ import annotations

import time
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from pagewire.engine_core.adapters.table import AdapterTable, Refusal
from pagewire.engine_core.admission.lobby import ended
from pagewire.engine_core.clients.requests import EngineRequests
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.wings.wing import Wing
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.ipc.wire.lora import AdapterLoaded, AdapterSource


class SleepState(Protocol):
    """Whether the workers sleep."""

    @property
    def asleep(self) -> AbstractSet[str]:
        """What the workers have given back."""


class AdapterService(Wing):
    """Has the workers read and drop adapters as `table` says; ends the requests that cannot have theirs."""

    def __init__(
        self,
        table: AdapterTable,
        scheduler: Scheduler,
        requests: EngineRequests,
        worker: WorkerGroup,
        sleep: SleepState,
    ) -> None:
        self._table, self._scheduler, self._requests = table, scheduler, requests
        self._worker, self._sleep = worker, sleep

    def preload(self, source: AdapterSource) -> None:
        """Load and keep the adapter that the engine starts with; without it, the engine ends."""
        self._table.preload(source, time.monotonic(), raise_error)

    def admitted(self) -> None:
        """Have the adapters read that sequences wait for."""
        if self._worker.accepting and not self._sleep.asleep:
            for command in self._table.commands(time.monotonic(), idle=not self._scheduler.in_flight):
                self._worker.send(command)

    @property
    def holds_steps(self) -> bool:
        """True while an adapter is read with nothing beside it."""
        return self._table.memory.holds_steps(self._worker.last_message)

    def check_timers(self, now: float) -> None:
        """End the requests whose adapter is read for too long."""
        self._refuse(self._table.expire(now))

    def receive(self, message: Any) -> bool:
        """Learn that an adapter was read, or why not."""
        if not isinstance(message, AdapterLoaded):
            return False
        self._refuse(self._table.loaded(message))
        return True

    def ended(self, sequence: Sequence, reason: str, now: float) -> None:
        """Learn that a sequence needs its adapter no longer."""
        self._table.ended(sequence)

    def worker_lost(self, why: str, *, was_ready: bool) -> None:
        """Let sequences with an adapter wait until new workers have loaded it."""
        now = time.monotonic()
        self._refuse(self._table.workers_lost(now, self._worker.last_message))
        self._table.queue.take_back(self._scheduler.waiting.withdraw(has_adapter), now)

    def _refuse(self, refusals: list[Refusal]) -> None:
        self._requests.refuse([ended(*refusal) for refusal in refusals])


def has_adapter(sequence: Sequence) -> bool:
    """True if a sequence runs with an adapter."""
    return sequence.adapter is not None


def raise_error(error: Exception | None) -> None:
    """Raise an error, if there is one."""
    if error is not None:
        raise error
