"""Token deltas on their way from the scheduler to the frontends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pagewire.engine_core.clients.clients import Clients
from pagewire.engine_core.schedule.scheduler import Outcome
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.wire.messages import TokenDelta


class DeltaOutbox:
    """Outcomes that the core has yet to send, so that the next step is launched before the last one is sent.

    on_end: called with each sequence that a delta ends, its finish reason, and the time.
    """

    def __init__(self, clients: Clients, on_end: Callable[[Sequence, str, float], None]) -> None:
        self._clients, self._on_end = clients, on_end
        self._outcomes: list[Outcome] = []

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Queue outcomes, behind those that are queued already."""
        self._outcomes += outcomes

    def send(self, now: float) -> None:
        """Send each frontend its queued deltas in one message; report the sequences that these deltas end.

        A delta of a sequence that its frontend has given up is dropped: the key may be that of another request now.
        """
        outcomes, self._outcomes = self._outcomes, []
        by_client: dict[bytes, list[TokenDelta]] = {}
        for sequence, delta in outcomes:
            if self._is_awaited(sequence):
                if sequence.adapter is not None and delta.num_cached_tokens is not None:
                    delta.adapter = sequence.request.prompt.adapter
                by_client.setdefault(sequence.client, []).append(delta)
            if delta.finish_reason is not None:
                self._on_end(sequence, delta.finish_reason, now)
                self._forget(sequence)
        for identity, deltas in by_client.items():
            client = self._clients.attached.get(identity)
            if client is not None:
                self._clients.deliver(client, deltas)

    def _is_awaited(self, sequence: Sequence) -> bool:
        client = self._clients.attached.get(sequence.client)
        return client is not None and client.requests.get(sequence.key, sequence.index) is sequence

    def _forget(self, sequence: Sequence) -> None:
        if self._is_awaited(sequence):
            self._clients.attached[sequence.client].requests.end(sequence.key, sequence.index)
