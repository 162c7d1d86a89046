"""Token deltas on their way from the scheduler to the frontends."""

from __future__ import annotations

from collections.abc import Iterable

from pagewire.engine_core.clients.clients import Clients
from pagewire.engine_core.clients.metrics import Metrics
from pagewire.engine_core.schedule.scheduler import Outcome
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.messages import TokenDelta


class Outbox:
    """Outcomes that the core has yet to send, so that the next step is launched before the last one is sent."""

    def __init__(self, clients: Clients, metrics: Metrics) -> None:
        self._clients, self._metrics = clients, metrics
        self._outcomes: list[Outcome] = []

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Queue outcomes, behind those that are queued already."""
        self._outcomes += outcomes

    def send(self, now: float) -> None:
        """Send each frontend its queued deltas in one message; record the sequences that these deltas end.

        A delta of a sequence that its frontend has given up is dropped: the key may be that of another request now.
        """
        outcomes, self._outcomes = self._outcomes, []
        by_client: dict[bytes, list[TokenDelta]] = {}
        for sequence, delta in outcomes:
            if self._is_awaited(sequence):
                by_client.setdefault(sequence.client, []).append(delta)
            if delta.finish_reason is not None:
                self._metrics.finished(sequence, delta.finish_reason, now)
                self._forget(sequence)
        for identity, deltas in by_client.items():
            client = self._clients.attached.get(identity)
            if client is not None:
                self._clients.deliver(client, deltas)

    def _is_awaited(self, sequence: Sequence) -> bool:
        client = self._clients.attached.get(sequence.client)
        group = client.requests.get(sequence.key) if client else None
        return group is not None and group.get(sequence.index) is sequence

    def _forget(self, sequence: Sequence) -> None:
        if self._is_awaited(sequence):
            requests = self._clients.attached[sequence.client].requests
            del requests[sequence.key][sequence.index]
            if not requests[sequence.key]:
                del requests[sequence.key]
