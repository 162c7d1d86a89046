"""The log probabilities that are kept for an answer stay within its budget."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.frontend.requests.answer_budget import AnswerTooLargeError, LogprobBudget
from pagewire.frontend.requests.outputs import Outputs, RequestState
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Abort, Deltas, Request, TokenDelta
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams
from tests.frontend.logprob_rows import rows

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def request(key: int, num_prompt: int = 3, **params: Any) -> Request:
    sampling = SamplingParams(max_tokens=100, logprobs=1, **params)
    return Request(key, f"r{key}", Prompt([5] * num_prompt), sampling, seed=0)


def delta(key: int, index: int = 0, num_tokens: int = 1) -> TokenDelta:
    """Tokens with two log probabilities each."""
    positions = rows([[5, 6]] * num_tokens, [[-0.5, -0.25]] * num_tokens, [2] * num_tokens)
    return TokenDelta(key, index, [5] * num_tokens, logprobs=positions)


def test_prompts_are_counted_before_they_are_submitted() -> None:
    budget = LogprobBudget(100, num_copies=2, vocab_size=50)
    budget.expect(request(0))  # asks for none of the prompt
    budget.expect(request(1, 10, prompt_logprobs=2))  # 10 positions of 3 candidates, in 2 copies
    with pytest.raises(AnswerTooLargeError, match=r"prompt_logprobs: .* 120 .* at most 100 .*--max-request"):
        budget.expect(request(2, 10, prompt_logprobs=2))
    with pytest.raises(AnswerTooLargeError, match="102"):
        LogprobBudget(100, 2, vocab_size=50).expect(request(3, 1, prompt_logprobs=-1))


def test_an_answer_that_keeps_too_many_ends_with_an_error_and_the_others_go_on() -> None:
    outputs, budget = Outputs(), LogprobBudget(10, 1, 50)
    first, second = (
        RequestState(request(key, output_kind=FINAL_ONLY, n=2), None, None, budget) for key in (0, 1)
    )
    other = RequestState(request(2, output_kind=FINAL_ONLY), None, None, LogprobBudget(10, 1, 50))
    for state in (first, second, other):
        outputs.add(state)
    assert outputs.process(Deltas([delta(0, 0, 2), delta(1, 1, 3), delta(2, 0, 5)]))[1] == Abort()
    states, to_drop = outputs.process(Deltas([delta(0, 1, 1), delta(2)]))
    assert first.finished and isinstance(first.exception(), ValueError)
    assert "logprobs: the answer has 12 log probabilities or more; at most 10" in str(first.exception())
    assert 0 in to_drop.keys  # the core knows nothing of this end
    assert other in states and isinstance(other.exception(), ValueError)  # by its own budget
    assert not second.finished and 0 not in outputs.states and 1 in outputs.states


def test_what_a_stream_has_delivered_does_not_count() -> None:
    state = RequestState(request(0, output_kind=DELTA), None, None, LogprobBudget(10, 1, 50))
    for _ in range(20):
        state.apply(delta(0, num_tokens=4))
        output = state.take()
        assert output is not None and output.outputs[0].logprobs is not None
        assert len(output.outputs[0].logprobs) == 4
    state.apply(delta(0, num_tokens=5))
    with pytest.raises(AnswerTooLargeError):  # the reader is too slow
        state.apply(delta(0))
