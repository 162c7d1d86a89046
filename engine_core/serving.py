"""What the core's loop does once its workers are ready."""

from __future__ import annotations

import time

from pagewire.engine_core.engine import OpenEngine
from pagewire.engine_core.intake import AdapterNames, CallTaker, MessageIntake
from pagewire.engine_core.workers.group import FromGroup
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.steps import StepResult
from pagewire.ipc.wire.worker_messages import Ready


class Serving:
    """Runs the requests of an engine.

    calls: runs the calls of frontends. adapters: those that requests may name; None: there are none.
    """

    def __init__(self, engine: OpenEngine, calls: CallTaker, adapters: AdapterNames | None = None) -> None:
        self.engine = engine
        self.intake = MessageIntake(engine, calls, adapters)
        self._wings = engine.wings

    # ------------------------------------------------------------ a turn of the loop

    @property
    def is_idle(self) -> bool:
        """True if no request is unfinished, and everything is sent."""
        engine, lobby = self.engine, self.engine.lobby
        waits = lobby.num_processing or lobby.num_compiling or lobby.num_loading
        return not (engine.scheduler.num_unfinished or waits or engine.clients.behind)

    def has_saved(self) -> bool:
        """Begin to save what another start can use; True once all of it is saved."""
        saved = [wing.has_saved() for wing in self._wings]  # each begins
        return all(saved)

    @property
    def has_work(self) -> bool:
        """True if the loop should not wait for messages."""
        return self.engine.lobby.has_work or self.intake.has_work

    @property
    def awaits_workers(self) -> bool:
        """True if requests or calls wait for workers."""
        engine = self.engine
        waits = engine.scheduler.num_unfinished or len(engine.lobby)
        return bool(waits) or any(wing.awaits_workers for wing in self._wings)

    def wait(self, now: float) -> float:
        """Seconds for which the loop may wait for messages; infinite if there is nothing else to do."""
        return min(wing.wait(now) for wing in self._wings)

    def advance(self, awake_at: float) -> None:
        """Admit what need wait no longer, launch steps, and only then deliver. awake_at: when this turn began."""
        engine = self.engine
        engine.requests.drop(engine.clients.lost())
        engine.admit()
        for wing in self._wings:
            wing.advance()
        if not any(wing.holds_steps for wing in self._wings):
            engine.steps.launch()
        engine.requests.deliver()
        for wing in self._wings:
            wing.flush(time.monotonic())
        for wing in self._wings:
            wing.turned(time.monotonic() - awake_at)

    def check_timers(self, now: float) -> None:
        """End what has waited for too long."""
        for wing in self._wings:
            wing.check_timers(now)

    def tidy(self) -> None:
        """Give memory back; called about once a second."""
        for wing in self._wings:
            wing.tidy()

    def close(self) -> None:
        """End what the engine has opened."""
        for wing in self._wings:
            wing.close()

    # ------------------------------------------------------------ the workers

    def receive(self, message: FromGroup) -> None:
        """Take a message of the workers."""
        if isinstance(message, StepResult):
            self.engine.steps.commit(message)
        else:
            any(wing.receive(message) for wing in self._wings)

    def worker_ready(self, ready: Ready) -> None:
        """Learn what workers have that are ready."""
        for wing in self._wings:
            wing.worker_ready(ready)

    def worker_lost(self, why: str, *, was_ready: bool) -> None:
        """Take the steps in flight back."""
        self.engine.requests.outbox.add(self.engine.scheduler.fail(time.monotonic()))
        for wing in self._wings:
            wing.worker_lost(why, was_ready=was_ready)

    def start_failed(self, why: str) -> None:
        """Learn that workers could not be started."""
        for wing in self._wings:
            wing.start_failed(why)


def shortage(ready: Ready, info: EngineInfo) -> str | None:
    """What a new worker has less of than the one before, blocks or state slots, as text; None: nothing."""
    for name, number, needed in (
        ("KV blocks", ready.num_blocks, info.num_blocks),
        ("state slots", ready.num_states, info.num_states),
    ):
        if number < needed:
            return f"not enough memory: the new worker has only {number} {name}"
    return None
