"""A batch of any size has a bounded number of tokens in the core at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pagewire.frontend.api import batch as batches
from pagewire.frontend.api.batch import GradualBatch, num_core_tokens
from pagewire.frontend.requests.inputs import Prepared
from pagewire.frontend.requests.outputs import RequestState
from pagewire.frontend.requests.pooling.state import PooledState
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Request
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams

MAX_TOKENS = 100


def state_of(request: Request) -> RequestState:
    pools = isinstance(request.task, PoolingParams)
    return PooledState(request) if pools else RequestState(request, None, None)


class Session:
    """A session whose core has an output for every request as soon as it is waited for."""

    def __init__(self) -> None:
        self.in_core: dict[int, Request] = {}
        self.most = 0

    def submit(self, prepared: Sequence[Prepared], inbox: Any) -> list[RequestState]:
        states = [state_of(item.request) for item in prepared]
        self.in_core |= {state.key: state.request for state in states}
        self.most = max(self.most, sum(map(num_core_tokens, self.in_core.values())))
        inbox.put(states)
        return states

    def take(self, state: RequestState) -> int:
        del self.in_core[state.key]
        return 10 * state.key


@pytest.mark.parametrize("task", [SamplingParams(n=2), PoolingParams(task="embed")])
def test_the_core_has_few_at_a_time_and_outputs_are_in_order(
    monkeypatch: pytest.MonkeyPatch, task: Any
) -> None:
    monkeypatch.setattr(batches, "MAX_TOKENS_IN_CORE", MAX_TOKENS)
    session, ticks = Session(), list[int]()
    batch = GradualBatch(session, ticks.append)  # type: ignore[arg-type]
    prepared = [Prepared(Request(key, f"r{key}", Prompt([5] * 5), task, 7), None) for key in range(60)]
    largest = 4 * num_core_tokens(prepared[0].request)
    for start in range(0, 60, 4):
        batch.submit(prepared[start : start + 4])
    assert batch.outputs() == [10 * key for key in range(60)]
    assert sorted(ticks) == [10 * key for key in range(60)]
    assert MAX_TOKENS < session.most <= MAX_TOKENS + largest
    assert not session.in_core and [state.key for state in batch.states] == list(range(60))
