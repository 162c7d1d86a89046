"""Requests that wait to be submitted: tenants in turn, each in order, and calls behind what came before them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.engine_core.clients import arrivals
from pagewire.engine_core.clients.arrivals import Arrivals
from pagewire.engine_core.clients.backlog import Backlog
from pagewire.engine_core.clients.clients import AttachedClient
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Call
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request
from pagewire.ipc.wire.window import WINDOW_BYTES, WINDOW_REQUESTS


def client(number: int) -> AttachedClient:
    return AttachedClient(b"%d" % number, number, "", 0, 0.0, "", frozenset(), Backlog(lambda _: []))


def request(key: int, tenant: str = "") -> Request:
    return Request(key, f"r{key}", Prompt([1]), SamplingParams(), 0, tenant=tenant)


def popped(waiting: Arrivals) -> list[int]:
    return [waiting.pop()[1].key for _ in range(len(waiting))]


def test_tenants_take_turns() -> None:
    waiting, server, other = Arrivals(), client(1), client(2)
    waiting.add(server, [request(key, "many") for key in range(100)], 1000)
    waiting.add(server, [request(100, "one")], 10)
    waiting.add(other, [request(101, "many"), request(102)], 10)
    assert popped(waiting) == [0, 100, 101, 102, *range(1, 100)]
    assert not waiting and not waiting.full
    with pytest.raises(StopIteration):
        waiting.pop()


def test_limits() -> None:
    waiting, server = Arrivals(), client(1)
    waiting.add(server, [request(0), request(1)], arrivals.MAX_BYTES)
    assert waiting.full
    waiting.pop()
    assert not waiting.full
    waiting.add(server, [request(0)] * arrivals.MAX_REQUESTS, 0)
    assert waiting.full
    while waiting:
        waiting.pop()
    assert not waiting.full
    waiting.add(server, [request(0)], 0)
    for number in range(arrivals.MAX_CALLS):
        assert not waiting.full
        waiting.add_call(server, Call(number, "status"))
    assert waiting.full


def test_each_tenant_has_a_window() -> None:
    waiting, server, other = Arrivals(), client(1), client(2)
    full = [request(key) for key in range(WINDOW_REQUESTS)]
    assert waiting.admits(server, full * 2, 1 << 30), "where nothing waits, anything may come"
    waiting.add(server, full, 1000)
    assert not waiting.admits(server, [request(0)], 1)
    assert not waiting.admits(server, [request(0, "a"), request(1)], 1)
    assert waiting.admits(server, [request(0, "a")], 1) and waiting.admits(other, full, 1000)
    waiting.pop()
    assert waiting.admits(server, [request(0)], 1) and not waiting.admits(server, full[:2], 1)
    waiting.remove(server, range(10))
    assert waiting.admits(server, full[:10], 1) and not waiting.admits(server, full[:11], 1)
    waiting.add(other, full[:1], WINDOW_BYTES)
    assert not waiting.admits(other, full[:1], 1)
    waiting.remove(server, range(WINDOW_REQUESTS))
    waiting.remove(other, [0])
    assert not waiting._queues


def test_what_is_removed_costs_nobody_a_turn() -> None:
    waiting, server = Arrivals(), client(1)
    for tenant in ("a", "b"):
        waiting.add(server, [request(key, tenant) for key in range(5)], 500)
    waiting.add(client(2), [request(1)], 1)
    assert [gone.key for gone in waiting.remove(server, {0, 3})] == [0, 3, 0, 3]
    assert len(waiting) == 7 and [waiting.pop()[1].tenant for _ in range(3)] == ["a", "b", ""]
    assert len(waiting.remove(server, set(range(5)))) == 4
    assert not waiting and waiting._total.num_bytes == 0


class Model:
    """What `Arrivals` should do, plainly: a list in order of arrival."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int, Any]] = []

    def calls_due(self) -> list[int]:
        due = [
            call
            for index, (kind, owner, call) in enumerate(self.entries)
            if kind == "call" and not any(k == "request" and o == owner for k, o, _ in self.entries[:index])
        ]
        self.entries = [e for e in self.entries if not (e[0] == "call" and e[2] in due)]
        return due


@given(st.lists(st.tuples(st.sampled_from("aacpr"), st.integers(1, 2), st.sampled_from("xy")), max_size=40))
def test_any_order_of_requests_and_calls(actions: list[tuple[str, int, str]]) -> None:
    waiting, model, clients = Arrivals(), Model(), {number: client(number) for number in (1, 2)}
    for number, (action, owner, tenant) in enumerate(actions):
        if action == "a":
            waiting.add(clients[owner], [request(number, tenant)], 7)
            model.entries.append(("request", owner, (number, tenant)))
        elif action == "c":
            waiting.add_call(clients[owner], Call(number, "status"))
            model.entries.append(("call", owner, number))
        elif action == "p" and waiting:
            taken_from, taken = waiting.pop()
            entry = ("request", taken_from.number, (taken.key, taken.tenant))
            first = next(
                e
                for e in model.entries
                if e[:2] == entry[:2] and e[0] == "request" and e[2][1] == taken.tenant
            )
            assert first == entry, "not in the order of its tenant"
            model.entries.remove(entry)
        elif action == "r":
            waiting.remove(clients[owner], range(0, number, 2))
            model.entries = [
                e for e in model.entries if not (e[0] == "request" and e[1] == owner and e[2][0] % 2 == 0)
            ]
        assert [call.call_id for _, call in waiting.pop_calls()] == model.calls_due()
        assert len(waiting) == sum(kind == "request" for kind, *_ in model.entries)
    assert waiting._total.num_bytes == 7 * len(waiting)
