"""Budgets of reasoning: where a sequence is, by its tokens."""

from __future__ import annotations

import pytest

from pagewire.ipc.wire.thinking import ThinkingMarks, ThinkingState, finish_of

OPEN, CLOSE = [5, 6], 9


def marks(begun: bool | None = None) -> ThinkingMarks:
    return ThinkingMarks(begun=begun, open_ids=OPEN, close_id=CLOSE)


@pytest.mark.parametrize(
    ("begun", "prompt", "output", "forced", "ended_by"),
    [
        (None, [1, 5, 6], [1, 2], True, None),  # the prompt opens the reasoning
        (None, [1, 5, 6], [1], False, None),
        (None, [5, 6, 1, 9, 3], [1, 2, 3], False, None),  # and here it has closed it
        (None, [5, 6, 1, 9, 3], [5, 6, 1, 2], True, None),
        (None, [5, 1, 6], [1, 2, 3], False, None),
        (True, [1], [1, 2], True, None),
        (False, [5, 6], [1, 2], False, None),
        (True, [1], [1, 2, 9, 4, 5], False, "budget"),
        (True, [1], [1, 9, 4, 5, 4], False, "stop"),
        (True, [1], [9], False, None),  # it was empty
        (True, [1], [1, 9, 5, 6, 2], True, None),  # opened again, it goes on with the budget
        (True, [1], [1, 9, 5, 6, 2, 9], False, "budget"),
    ],
)
def test_states(
    begun: bool | None, prompt: list[int], output: list[int], forced: bool, ended_by: str | None
) -> None:
    state = ThinkingState(2, marks(begun), prompt)
    for token_id in output:
        before = state.copy()
        ahead = state.copy()
        ahead.add(token_id)
        assert (state.forced, state.num_tokens) == (before.forced, before.num_tokens)
        state.add(token_id)
        assert (state.forced, state.num_tokens) == (ahead.forced, ahead.num_tokens)
    assert state.forced == (CLOSE if forced else None)
    assert finish_of(2, marks(begun), prompt, output) == ended_by


def test_a_budget_of_nothing() -> None:
    assert ThinkingState(0, marks(True), []).forced == CLOSE
    assert finish_of(0, marks(True), [], [CLOSE, 1]) == "budget"
