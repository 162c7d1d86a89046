"""What the core's loop does once its workers are ready."""

from __future__ import annotations

import logging
import time

from pagewire.engine_core.admission.lobby import ended
from pagewire.engine_core.clients.control import Control
from pagewire.engine_core.clients.intake import MessageIntake
from pagewire.engine_core.clients.metrics import summary
from pagewire.engine_core.engine import OpenEngine
from pagewire.engine_core.schedule.scheduler import SchedulerConfig
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.workers.group import GroupReply
from pagewire.engine_core.workers.supervisor import CoreError
from pagewire.ipc.wire.lora import AdapterLoaded, AdapterSource
from pagewire.ipc.wire.worker_messages import Ready, StepResult

logger = logging.getLogger("pagewire.core")


class Serving:
    """Runs the requests of an engine."""

    def __init__(self, engine: OpenEngine) -> None:
        self.engine = engine
        self.control = Control(engine)
        self.intake = MessageIntake(engine, self.control)
        self._next_stats = 0.0

    # ------------------------------------------------------------ a turn of the loop

    @property
    def is_idle(self) -> bool:
        """True if no request is unfinished, and everything is sent."""
        engine, lobby = self.engine, self.engine.lobby
        waits = lobby.num_processing or lobby.num_compiling or lobby.num_loading
        return not (engine.scheduler.num_unfinished or waits or engine.clients.behind)

    @property
    def has_work(self) -> bool:
        """True if the loop should not wait for messages."""
        return self.engine.lobby.has_work or self.intake.has_work

    def advance(self) -> None:
        """Admit what need wait no longer, launch steps, and only then deliver."""
        engine = self.engine
        for client in engine.clients.lost():
            engine.requests.drop(client.requests)
        engine.admit()
        self.control.advance()
        if not self._holds_steps:
            engine.steps.launch()
        engine.requests.deliver()
        engine.block_events.flush(time.monotonic())

    def check_timers(self, now: float) -> None:
        """End what has waited for too long."""
        self.control.check_timers(now)
        if self.engine.adapters is not None:
            self.engine.requests.refuse([ended(*refused) for refused in self.engine.adapters.expire(now)])

    def log_stats(self, now: float) -> None:
        """Every interval, compute its rates, and log them unless the engine was idle; warn of preemptions."""
        engine = self.engine
        if now < self._next_stats:
            return
        self._next_stats = now + engine.config.args.log_stats_interval
        engine.requests.deliver()  # requests count as finished when their end is sent
        engine.metrics.rates.update(engine.scheduler.stats, now)
        number = engine.scheduler.stats.num_cache_preemptions
        if (warning := engine.metrics.preemption_warnings.text(number, now)) is not None:
            logger.warning("%s", warning)
        busy = engine.scheduler.num_unfinished or engine.metrics.rates.prompt or engine.metrics.rates.output
        if busy and not engine.config.args.disable_log_stats:
            line, facts = summary(engine)
            logger.info("%s", line, extra={"facts": facts})

    @property
    def _holds_steps(self) -> bool:
        """True while a call or an adapter lets no step be launched."""
        engine = self.engine
        if engine.adapters is not None and engine.adapters.memory.holds_steps(engine.worker.last_message):
            return True
        return self.control.holds_plans

    # ------------------------------------------------------------ the workers

    def receive(self, message: StepResult | GroupReply | AdapterLoaded) -> None:
        """Take a message of the workers."""
        if isinstance(message, StepResult):
            self.engine.steps.commit(message)
        elif isinstance(message, GroupReply):
            self.control.receive(message)
        elif self.engine.adapters is not None:
            refusals = self.engine.adapters.loaded(message)
            self.engine.requests.refuse([ended(*refused) for refused in refusals])

    def worker_lost(self, why: str, *, was_ready: bool) -> None:
        """Take the steps in flight back; sequences with an adapter wait until new workers have loaded it."""
        engine, now = self.engine, time.monotonic()
        engine.requests.outbox.add(engine.scheduler.fail(now))
        if engine.adapters is not None:
            refused = engine.adapters.workers_lost(now, engine.worker.last_message)
            engine.requests.refuse([ended(*refusal) for refusal in refused])
            engine.adapters.queue.take_back(engine.scheduler.waiting.withdraw(has_adapter), now)
        self.control.worker_lost(why, was_ready=was_ready)

    def load_first_adapter(self, source: AdapterSource | None) -> None:
        """Load and keep the adapter that the engine starts with; without it, the engine ends."""
        if source is not None and self.engine.adapters is not None:
            self.engine.adapters.preload(source, time.monotonic(), raise_error)


def raise_error(error: Exception | None) -> None:
    """Raise an error, if there is one."""
    if error is not None:
        raise error


def has_adapter(sequence: Sequence) -> bool:
    """True if a sequence runs with an adapter."""
    return sequence.adapter is not None


def check_size(ready: Ready, config: SchedulerConfig) -> None:
    """Check that a new worker has as many blocks and state slots as the one before.

    Raises:
        CoreError: it has not.
    """
    for name, number, needed in (
        ("KV blocks", ready.num_blocks, config.num_blocks),
        ("state slots", ready.num_states, config.num_states),
    ):
        if number < needed:
            raise CoreError(f"not enough memory: the new worker has only {number} {name}")
