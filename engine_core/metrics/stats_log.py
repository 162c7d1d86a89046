"""The lines that the log gets of an engine at intervals: its rates, and warnings of preemptions."""

from __future__ import annotations

import logging
from typing import Protocol

from pagewire.engine_core.clients.requests import EngineRequests
from pagewire.engine_core.metrics.metrics import MeasuredEngine, summary
from pagewire.engine_core.wings.wing import Wing

logger = logging.getLogger("pagewire.core")


class LoggedEngine(MeasuredEngine, Protocol):
    """The part of the core that is logged."""

    @property
    def requests(self) -> EngineRequests:
        """The unfinished requests of all frontends."""


class StatsLog(Wing):
    """Every interval, computes the rates of an engine, and logs them unless it was idle; warns of preemptions."""

    def __init__(self, engine: LoggedEngine) -> None:
        self._engine = engine
        self._next = 0.0

    def check_timers(self, now: float) -> None:
        """Log what is due."""
        engine = self._engine
        if now < self._next:
            return
        self._next = now + engine.config.args.log_stats_interval
        engine.requests.deliver()  # requests count as finished when their end is sent
        engine.metrics.rates.update(engine.scheduler.stats, engine.scheduler.speculation.stats, now)
        number = engine.scheduler.stats.num_cache_preemptions
        if (warning := engine.metrics.preemption_warnings.text(number, now)) is not None:
            logger.warning("%s", warning)
        busy = engine.scheduler.num_unfinished or engine.metrics.rates.prompt or engine.metrics.rates.output
        if busy and not engine.config.args.disable_log_stats:
            line, facts = summary(engine)
            logger.info("%s", line, extra={"facts": facts})
