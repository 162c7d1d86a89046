"""Tenants of a whole core: frontends without names, names that they give, the full queue, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Deltas, Submit
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request
from tests.engine_core.conftest import RawFrontend


def request(key: int, tenant: str = "", rank: int = 0, **params: Any) -> Request:
    task = SamplingParams(**({"max_tokens": 100, "ignore_eos": True} | params))
    return Request(key, f"r{key}", Prompt([5, 6, 7]), task, 7, rank=rank, tenant=tenant)


def attached(core: Any, name: str) -> RawFrontend:
    frontend: RawFrontend = core.frontend(name)
    frontend.attach()
    return frontend


def test_a_frontend_does_not_wait_behind_the_queue_of_another(start_core: Callable[..., Any]) -> None:
    """Without names, each frontend is a tenant."""
    core = start_core(max_num_seqs=4)
    greedy, modest = attached(core, "greedy"), attached(core, "modest")
    greedy.say(Submit([request(key) for key in range(400)]))
    assert greedy.status()["waiting"] > 300
    modest.submit(1, [7], max_tokens=2)
    modest.finish((1, 0))
    assert modest.status()["waiting"] > 200  # the greedy one has most still before it


def test_names_count_across_frontends_and_in_the_metrics(start_core: Callable[..., Any]) -> None:
    core = start_core()
    first, second = attached(core, "first"), attached(core, "second")
    for frontend in (first, second):
        frontend.say(Submit([request(1, "alice", max_tokens=5, n=2), request(2, "bob", max_tokens=3)]))
        frontend.finish((1, 0), (1, 1), (2, 0))
    first.submit(3, [1, 2])
    first.finish((3, 0))
    rows = [row for row in first.call("metrics").result if "tenant" in row["labels"]]
    values = {
        (row["name"], row["labels"]["tenant"], row["labels"].get("kind") or row["labels"].get("phase")): row[
            "value"
        ]
        for row in rows
    }
    assert {tenant for _, tenant, _ in values} == {"alice", "bob"}  # frontends have metrics of their own
    assert values["pagewire:tenant_requests_total", "alice", None] == 2
    assert values["pagewire:tenant_tokens_total", "alice", "output"] == 20
    assert values["pagewire:tenant_tokens_total", "bob", "output"] == 6
    assert values["pagewire:tenant_tokens_total", "bob", "prompt"] == 6
    assert values["pagewire:tenant_sequences", "alice", "running"] == 0


def test_labels_are_bounded(start_core: Callable[..., Any]) -> None:
    frontend = attached(start_core(), "many")
    frontend.say(Submit([request(key, f"tenant-{key}", max_tokens=1) for key in range(150)]))
    frontend.finish(*((key, 0) for key in range(150)))
    rows = [row for row in frontend.call("metrics").result if row["name"] == "pagewire:tenant_requests_total"]
    assert len(rows) == 101 and sum(row["value"] for row in rows) == 150
    assert rows[-1]["labels"]["tenant"] == "(others)" and rows[-1]["value"] == 50


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"tenant": "a b"}, "tenant's name"),
        ({"tenant": "x" * 65}, "tenant's name"),
        ({"rank": -1}, "rank must"),
    ],
)
def test_the_core_checks_names_and_ranks_itself(
    start_core: Callable[..., Any], bad: dict[str, Any], reason: str
) -> None:
    frontend = attached(start_core(), "test")
    frontend.say(Submit([request(1, **bad)]))
    answer = frontend.hear()
    assert isinstance(answer, Deltas) and reason in str(answer.deltas[0].error)
    assert answer.deltas[0].error_type == "ValueError"


def test_a_full_queue_has_room_for_another_tenant(start_core: Callable[..., Any]) -> None:
    core = start_core(max_num_seqs=1, max_waiting=40)
    greedy, modest = attached(core, "greedy"), attached(core, "modest")
    greedy.say(Submit([request(key) for key in range(60)]))
    assert greedy.status()["waiting"] > 30
    refused = [place for place, end in greedy.ends.items() if end.error_type == "EngineBusyError"]
    assert len(refused) >= 10
    modest.submit(1, [7], max_tokens=2)
    modest.finish((1, 0))
    assert modest.ends[1, 0].finish_reason == "length"
