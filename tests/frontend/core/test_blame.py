"""Which request is to blame for dead cores, and in which order suspects are tried."""

from __future__ import annotations

import random

import pytest

from pagewire.frontend.core.blame import TRIALS, Blame
from pagewire.frontend.requests.outputs import RequestState
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Request, TokenDelta
from pagewire.ipc.wire.params import SamplingParams


def new_state(key: int, tokens: int = 0, n: int = 1) -> RequestState:
    state = RequestState(Request(key, f"r{key}", Prompt([1]), SamplingParams(n=n), seed=0), None, None)
    state.apply(TokenDelta(key, 0, [1] * tokens))
    return state


def test_blame_needs_two_deaths_and_nothing_else_in_flight() -> None:
    blame, states = Blame(), [new_state(key) for key in range(3)]
    assert blame.core_died(states[:1], []) is None  # alone, but the first death
    assert blame.core_died(states, []) is None  # the second, but not alone
    assert blame.core_died(states[1:2], [states[0], states[2]]) is states[1]
    assert blame.suspects(states) == []  # the others are free of suspicion
    assert blame.core_died(states[:1], states[2:]) is None


def test_a_request_on_trial_is_to_blame_among_those_that_have_seen_no_death() -> None:
    """As on one of several cores, where others go on beside the trial."""
    states = [new_state(key) for key in range(4)]
    for on_trial, lost, guilty in (
        (states[0], states[:1] + states[2:], states[0]),
        (None, states[:1] + states[2:], None),  # the core died of something else
        (states[0], states[:2] + states[2:], None),  # so it may be the other suspect
        (states[0], states[2:], None),  # it was tried elsewhere
    ):
        blame = Blame()
        assert blame.core_died(states[:2], states[2:]) is None
        assert blame.core_died(lost, [state for state in states if state not in lost], on_trial) is guilty


def test_a_request_that_the_core_did_not_have_is_no_more_suspect_than_before() -> None:
    blame, states = Blame(), [new_state(key) for key in range(3)]
    assert blame.core_died(states[:2], states[2:]) is None
    assert states[2] not in blame.suspects(states)
    assert blame.core_died([], states) is None
    assert blame.core_died(states[2:], states[:2]) is None
    assert set(blame.suspects(states)) == set(states)
    assert blame.suspects(states[:1]) == states[:1]  # what has ended meanwhile is not tried


def test_what_has_brought_nothing_is_tried_first() -> None:
    blame = Blame()
    states = [new_state(key, tokens=key % 2) for key in range(8)]
    blame.core_died(states, [])
    assert [state.key for state in blame.suspects(states)] == [6, 0, 4, 2, 7, 5, 3, 1]
    blame.passed(states[6])
    assert [state.key for state in blame.suspects(states)] == [0, 4, 2, 7, 5, 3, 1, 6]


def test_each_trial_takes_more_tokens() -> None:
    blame, one, many = Blame(), new_state(1), new_state(2, n=3)
    for expected in (4, 64, 1024):
        blame.core_died([one, many], [])
        assert (blame.tokens_to_bring(one), blame.tokens_to_bring(many)) == (expected, 3 * expected)


@pytest.mark.parametrize("number", [1, 2, 5, TRIALS])
def test_a_killer_is_found_after_two_deaths_wherever_it_stands(number: int) -> None:
    draw = random.Random(number)
    for guilty in range(number):
        blame, states = Blame(), [new_state(key, tokens=draw.randint(0, 1)) for key in range(number)]
        assert blame.core_died(states, []) is None
        for state in blame.suspects(states):
            if state.key == guilty:
                held = [other for other in states if other is not state]
                assert blame.core_died([state], held) is state
                break
            blame.passed(state)
        else:
            raise AssertionError("it was not tried")


def test_a_killer_among_many_is_tried_in_the_end() -> None:
    """Each death without a culprit brings others to trial."""
    blame, states = Blame(), [new_state(key) for key in range(5 * TRIALS)]
    tried: set[int] = set()
    for _ in range(5):
        blame.core_died(states, [])
        for state in blame.suspects(states):
            tried.add(state.key)
            blame.passed(state)
    assert tried == set(range(5 * TRIALS))
