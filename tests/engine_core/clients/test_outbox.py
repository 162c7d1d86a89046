"""Tests of the outbox: what frontends get of steps, as tokens or as deltas, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pagewire.engine_core.clients.outbox import DeltaOutbox
from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.engine_core.schedule.step import StepOutcomes
from pagewire.engine_core.tenants.accounts import Account
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Deltas
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request, TokenDelta


class AttachedNames:
    """Frontends that are attached, by name, and the messages to each."""

    def __init__(self, *names: str) -> None:
        self.messages: dict[str, list[Deltas]] = {name: [] for name in names}
        self.attached = {name.encode(): SimpleNamespace(name=name, requests=self) for name in names}

    def end(self, key: int, index: int) -> None:
        """No request is kept here."""

    def deliver(self, client: Any, message: Deltas) -> None:
        self.messages[client.name].append(message)


def awaited(key: int, client: str = "first", n: int = 1) -> list[Sequence]:
    """The sequences of a request that its frontend waits for."""
    request = Request(key, f"r{key}", Prompt([1, 2]), SamplingParams(n=n), seed=0)
    group = sequences(
        request,
        client.encode(),
        0,
        0.0,
        max_model_len=100,
        share_prefixes=True,
        tenant=Account(client.encode()),
    )
    for sequence in group:
        sequence.awaited = True
    return group


def outbox_of(clients: AttachedNames) -> tuple[DeltaOutbox, list[str]]:
    """An outbox, and the reasons with which it has reported ends."""
    reasons: list[str] = []
    outbox = DeltaOutbox(clients, lambda sequence, reason, now: reasons.append(reason))  # type: ignore[arg-type]
    return outbox, reasons


def test_tokens_go_to_their_frontends_by_columns() -> None:
    clients = AttachedNames("first", "second")
    outbox, _ = outbox_of(clients)
    (one,), (other,), (abandoned,) = awaited(1), awaited(1, "second"), awaited(3)
    first, further = awaited(4, n=2)
    abandoned.awaited = False
    outbox.add_step(StepOutcomes([one, other, abandoned, first, further], [5, 6, 7, 8, 9]))
    outbox.send(1.0)
    outbox.send(1.0)
    assert clients.messages["first"] == [Deltas([TokenDelta(4, 1, [9])], [1, 4], [5, 8])]
    assert clients.messages["second"] == [Deltas([], [1], [6])]


def test_the_tokens_of_a_sequence_stay_in_order_whatever_they_are_sent_as() -> None:
    clients = AttachedNames("first")
    outbox, reasons = outbox_of(clients)
    (one,), (other,) = awaited(1), awaited(2)
    outbox.add_step(StepOutcomes([one, other], [10, 20]))
    outbox.add_step(StepOutcomes([other], [21], [(one, TokenDelta(1, 0, [11], num_drafts=1))]))
    outbox.add_step(StepOutcomes([one, other], [12, 22]))
    outbox.add([(one, TokenDelta(1, 0, [], "abort"))])
    outbox.send(1.0)
    (message,) = clients.messages["first"]
    for key, expected in ((1, [10, 11, 12]), (2, [20, 21, 22])):
        deltas = [delta for delta in message if delta.key == key]
        assert [token_id for delta in deltas for token_id in delta.token_ids] == expected
    assert (message.deltas[-1].finish_reason, reasons) == ("abort", ["abort"])
