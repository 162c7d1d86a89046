"""Token deltas on their way from the scheduler to the frontends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from pagewire.engine_core.clients.clients import Clients
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.step import Outcome, StepOutcomes
from pagewire.ipc.wire.messages import Deltas
from pagewire.ipc.wire.requests import TokenDelta


class DeltaOutbox:
    """Outcomes that the core has yet to send, so that the next step is launched before the last one is sent.

    on_end: called with each sequence that a delta ends, its finish reason, and the time.
    """

    def __init__(self, clients: Clients, on_end: Callable[[Sequence, str, float], None]) -> None:
        self._clients, self._on_end = clients, on_end
        self._sequences: list[Sequence] = []
        self._token_ids: list[int] = []
        self._outcomes: list[Outcome] = []

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Queue outcomes, behind those that are queued already."""
        self._outcomes += outcomes

    def add_step(self, step: StepOutcomes) -> None:
        """Queue the outcomes of a step, behind those that are queued already."""
        if self._outcomes:  # among which may be an earlier one of the same sequence
            self._outcomes += step
            return
        self._sequences += step.sequences
        self._token_ids += step.token_ids
        self._outcomes += step.others

    def send(self, now: float) -> None:
        """Send each frontend its queued deltas in one message; report the sequences that these deltas end.

        A delta of a sequence that its frontend has given up is dropped: the key may be that of another request now.
        """
        by_client: defaultdict[bytes, Deltas] = defaultdict(Deltas)
        for sequence, token_id in zip(self._sequences, self._token_ids, strict=True):
            if sequence.awaited:
                message = by_client[sequence.client]
                if sequence.index:
                    message.deltas.append(TokenDelta(sequence.key, sequence.index, [token_id]))
                else:
                    message.keys.append(sequence.key)
                    message.token_ids.append(token_id)
        outcomes, self._outcomes = self._outcomes, []
        self._sequences, self._token_ids = [], []
        for sequence, delta in outcomes:
            if sequence.awaited:
                by_client[sequence.client].deltas.append(delta)
            if delta.finish_reason is not None:
                self._on_end(sequence, delta.finish_reason, now)
                if sequence.awaited:
                    self._clients.attached[sequence.client].requests.end(sequence.key, sequence.index)
        for identity, message in by_client.items():
            client = self._clients.attached.get(identity)
            if client is not None:
                self._clients.deliver(client, message)
