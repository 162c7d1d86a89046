"""The unfinished requests of all frontends: they are admitted to the scheduler, and ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

from pagewire.engine_core.adapters.table import AdapterTable
from pagewire.engine_core.admission.lobby import Lobby
from pagewire.engine_core.clients.clients import AttachedClient, Clients
from pagewire.engine_core.clients.metrics import Metrics
from pagewire.engine_core.clients.outbox import DeltaOutbox
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.step import Outcome
from pagewire.ipc.wire.messages import TokenDelta

logger = logging.getLogger("pagewire.core")


class EngineRequests:
    """The sequences in the lobby and in the scheduler, each with the frontend that submitted it.

    adapters: learns of ends; None if none are served.

    Attributes:
        outbox: deltas that are still to be sent.
    """

    def __init__(
        self,
        clients: Clients,
        lobby: Lobby,
        scheduler: Scheduler,
        metrics: Metrics,
        adapters: AdapterTable | None,
    ) -> None:
        self._clients, self._lobby, self._scheduler = clients, lobby, scheduler
        self._metrics, self._adapters = metrics, adapters
        self.outbox = DeltaOutbox(clients, self._ended)

    def __iter__(self) -> Iterator[tuple[AttachedClient, Sequence]]:
        for client in self._clients.attached.values():
            for sequence in client.requests:
                if not sequence.finished:
                    yield client, sequence

    def admit(self) -> None:
        """Schedule the sequences that need wait no longer; end those whose grammar or adapter is refused."""
        ready, refusals = self._lobby.ready(time.monotonic())
        for sequence in ready:
            self._scheduler.add(sequence)
        self.refuse(refusals)

    def refuse(self, refusals: list[Outcome]) -> None:
        """Log and send the ends of sequences that are not scheduled."""
        for sequence, delta in refusals:
            if sequence.index == 0:
                logger.warning(
                    "refused request %s: %s", sequence.request_id, " ".join(str(delta.error).split())
                )
        self.outbox.add(refusals)

    def drop(self, sequences: Iterable[Sequence], reason: str = "abort") -> None:
        """End sequences that their frontend no longer waits for; no delta is sent."""
        now = time.monotonic()
        for sequence in sequences:
            if not sequence.finished:
                self._remove(sequence)
                self._ended(sequence, reason, now)

    def abort(self, sequences: Iterable[Sequence]) -> int:
        """End sequences of any frontend with finish reason "abort"; returns how many were unfinished."""
        live = [sequence for sequence in sequences if not sequence.finished]
        for sequence in live:
            self._remove(sequence)
            self.outbox.add([(sequence, TokenDelta(sequence.key, sequence.index, [], "abort"))])
        return len(live)

    def deliver(self) -> None:
        """Send all queued deltas to the frontends."""
        self.outbox.send(time.monotonic())

    def _remove(self, sequence: Sequence) -> None:
        if not self._lobby.drop(sequence):
            self._scheduler.abort([sequence])

    def _ended(self, sequence: Sequence, reason: str, now: float) -> None:
        """Record the end of a sequence."""
        self._metrics.finished(sequence, reason, now)
        if self._adapters is not None:
            self._adapters.ended(sequence)
