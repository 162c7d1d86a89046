"""Calls of the workers' methods, with workers that are only a list of what was sent to them."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from pagewire.engine_core.calls.worker_calls import PendingCalls
from pagewire.engine_core.workers.group import GroupReply
from pagewire.ipc.wire.worker_messages import WorkerCall, WorkerReply


class Workers:
    """Workers that take calls while they are `accepting`."""

    def __init__(self) -> None:
        self.accepting = True
        self.last_sign = self.last_message = -math.inf
        self.sent: list[WorkerCall] = []

    def send(self, call: WorkerCall) -> None:
        self.sent.append(call)

    def answer(self, result: Any) -> GroupReply:
        """The answer to the call that was sent last."""
        call_id = self.sent[-1].call_id
        return GroupReply(call_id, [WorkerReply(call_id, result)])


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def calls(workers: Workers) -> PendingCalls:
    return PendingCalls(workers)  # type: ignore[arg-type]


def test_calls_are_sent_one_at_a_time(workers: Workers, calls: PendingCalls) -> None:
    """A step waits for one call at most, however many calls were made."""
    outcomes: list[Any] = []
    for number in range(5):
        calls.call("ping", {"number": number}, outcomes.append)
    for number in range(5):
        assert [call.kwargs["number"] for call in workers.sent] == list(range(number + 1))
        calls.receive(workers.answer(number))
    assert outcomes == [[0], [1], [2], [3], [4]]


def test_a_call_that_comes_first_passes_those_that_wait(workers: Workers, calls: PendingCalls) -> None:
    workers.accepting = False
    calls.call("ping", {}, lambda outcome: None)
    workers.accepting = True
    calls.call_first("sleep", {"level": 1}, lambda outcome: None)
    calls.workers_ready()
    assert [call.method for call in workers.sent] == ["sleep"]
    calls.receive(workers.answer(None))
    assert [call.method for call in workers.sent] == ["sleep", "ping"]


def test_a_long_call_has_its_own_time_limit_as_long_as_it_shows_progress(
    workers: Workers, calls: PendingCalls
) -> None:
    outcomes: list[Any] = []
    calls.call("wake_up", {}, outcomes.append)
    begin = time.monotonic()
    for seconds in range(100, 3600, 100):
        assert calls.expire(begin + seconds, step_limit=150) is None
        workers.last_message = begin + seconds
    assert calls.expire(begin + 3620, step_limit=150) == "wake_up has not returned within 3600 s"
    assert [type(outcome) for outcome in outcomes] == [TimeoutError]


def test_the_time_of_a_call_begins_when_the_step_before_it_is_over(
    workers: Workers, calls: PendingCalls
) -> None:
    calls.call("memory", {}, lambda outcome: None)
    workers.last_sign = workers.last_message = time.monotonic() + 140
    assert calls.expire(workers.last_sign + 100, step_limit=150) is None
    assert calls.expire(workers.last_sign + 151, step_limit=150) == "memory has not returned within 150 s"
