"""The unfinished requests of all frontends: they are admitted to the scheduler, and ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator

from pagewire.engine_core.admission.lobby import Lobby, refusal
from pagewire.engine_core.clients.clients import AttachedClient, Clients
from pagewire.engine_core.clients.outbox import DeltaOutbox
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.step import Outcome
from pagewire.engine_core.wings.wing import Wing
from pagewire.ipc.wire.requests import TokenDelta

logger = logging.getLogger("pagewire.core")


class EngineRequests:
    """The sequences in the lobby and in the scheduler, each with the frontend that submitted it.

    wings: learn of ends.

    Attributes:
        outbox: deltas that are still to be sent.
    """

    def __init__(self, clients: Clients, lobby: Lobby, scheduler: Scheduler, wings: Collection[Wing]) -> None:
        self._clients, self._lobby, self._scheduler, self._wings = clients, lobby, scheduler, wings
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

    def fail(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """End sequences with an error."""
        for sequence in sequences:
            if not sequence.finished:
                self._remove(sequence)
                self.outbox.add([(sequence, refusal(sequence, error))])

    def deliver(self) -> None:
        """Send all queued deltas to the frontends."""
        self.outbox.send(time.monotonic())

    def _remove(self, sequence: Sequence) -> None:
        if not self._lobby.drop(sequence):
            self._scheduler.abort([sequence])

    def _ended(self, sequence: Sequence, reason: str, now: float) -> None:
        """Record the end of a sequence."""
        for wing in self._wings:
            wing.ended(sequence, reason, now)
