"""Promised prefixes: how long they stay, how much of the cache they take, and what is said if it is too little."""

from __future__ import annotations

import pytest

from pagewire.engine_core.retention.promises import MAX_PROMISES, PrefixPromises, RetentionLimits
from pagewire.engine_core.schedule.scheduler import SchedulerConfig
from pagewire.engine_core.schedule.sequence import Sequence
from tests.engine_core.retention.simulated import RetainedSimulation, wish

A, B, C, D = ([first, *range(2, 12), *range(2, 10)] for first in (2, 3, 4, 5))  # 19 tokens: 4 full blocks


def run(simulation: RetainedSimulation, prompt: list[int], **more: object) -> Sequence:
    (sequence,) = simulation.submit(prompt, **more)  # type: ignore[arg-type]
    simulation.drain()
    return sequence


def press(simulation: RetainedSimulation) -> None:
    """Others need all that is not promised, twice over."""
    for first in range(2, 12):
        run(simulation, [first, 11, *range(2, 11), *range(2, 11)])


def test_a_promised_prefix_is_found_under_pressure() -> None:
    simulation = RetainedSimulation()
    first = run(simulation, A, retention=wish(1000.0))
    run(simulation, B)
    press(simulation)
    assert simulation.retained(first).num_tokens == 16
    assert run(simulation, A).num_cached_tokens == 16
    assert run(simulation, B).num_cached_tokens == 0


def test_it_is_evicted_once_the_promise_has_ended() -> None:
    simulation = RetainedSimulation()
    run(simulation, A, retention=wish(300.0))
    simulation.wait(299.0)
    assert simulation.promises.num_blocks == 4
    simulation.wait(2.0)
    assert simulation.promises.num_blocks == simulation.promises.num_promises == 0
    assert run(simulation, A).num_cached_tokens == 16, "it is cached like any other"
    press(simulation)
    assert run(simulation, A).num_cached_tokens == 0


def test_a_new_request_prolongs_a_promise_and_never_shortens_it() -> None:
    simulation = RetainedSimulation()
    run(simulation, A, retention=wish(300.0))
    simulation.wait(200.0)
    run(simulation, A, retention=wish(300.0))
    simulation.wait(200.0)
    run(simulation, A, retention=wish(1.0))
    press(simulation)
    assert run(simulation, A).num_cached_tokens == 16


def test_a_session_keeps_its_output_and_one_promise() -> None:
    simulation = RetainedSimulation(0.5, num_blocks=32)
    first = run(simulation, A, max_tokens=6, retention=wish(1000.0, name="s", with_output=True))
    assert simulation.retained(first).num_tokens == 24 and simulation.promises.num_promises == 1
    turn = run(simulation, [*first.token_ids, 3, 3], retention=wish(1000.0, name="s", with_output=True))
    assert turn.num_cached_tokens == 24
    assert simulation.promises.num_promises == 1 and simulation.promises.num_blocks == 7


def test_a_part_of_a_prompt() -> None:
    simulation = RetainedSimulation()
    sequence = run(simulation, A, retention=[*wish(2000.0, num_tokens=9), *wish(100.0)])
    assert [each.num_tokens for each in sequence.retained] == [8, 16]
    simulation.wait(200.0)
    press(simulation)
    assert run(simulation, A).num_cached_tokens == 8


def test_what_is_refused_is_said() -> None:
    simulation = RetainedSimulation(num_blocks=16)  # half of them: for the longest sequence
    assert simulation.promises.limits.num_blocks == 8
    sequences = [run(simulation, prompt, retention=wish(1000.0)) for prompt in (A, B, C)]
    assert [simulation.retained(sequence).refusal for sequence in sequences[:2]] == ["", ""]
    refused = simulation.retained(sequences[2])
    assert refused.num_tokens == 0 and refused.refusal == "of 8 KV blocks for promises, 8 are taken"
    assert simulation.promises.num_refused == 2, "after the first token, and again after the last"
    press(simulation)
    assert [run(simulation, prompt).num_cached_tokens for prompt in (A, B, C)] == [16, 16, 0]


def test_as_much_as_there_is_room_for() -> None:
    simulation = RetainedSimulation(0.25)
    sequence = run(simulation, [*A, 5, 5], retention=wish())
    assert simulation.retained(sequence).num_tokens == 16
    assert "of 4 KV blocks" in simulation.retained(sequence).refusal


def test_tenants_have_equal_shares() -> None:
    """What alice has over her share she keeps until its end, and cannot prolong."""
    simulation = RetainedSimulation(num_blocks=16)
    for prompt in (A, B):
        run(simulation, prompt, tenant="alice", retention=wish(400.0))
    late = run(simulation, C, tenant="bob", retention=wish(2000.0))
    assert simulation.retained(late).num_tokens == 0
    again = run(simulation, A, tenant="alice", retention=wish(2000.0))
    assert simulation.retained(again).refusal == (
        "a tenant's share is 4 KV blocks (2 have promises or want some), 8 are taken"
    )
    press(simulation)
    assert run(simulation, B, tenant="alice").num_cached_tokens == 16
    simulation.wait(400.0)
    assert simulation.retained(run(simulation, C, tenant="bob", retention=wish())).num_tokens == 16
    assert simulation.retained(run(simulation, A, tenant="alice", retention=wish())).num_tokens == 16
    over = run(simulation, B, tenant="alice", retention=wish())
    assert simulation.retained(over).num_tokens == 0


def test_little_is_kept_of_promises_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.engine_core.retention.promises.MAX_STALE", 4)
    simulation = RetainedSimulation(num_blocks=24)
    for number in range(30):
        run(simulation, [*A, number % 10], retention=wish(80_000.0, name="s"))
        assert simulation.release("s") > 0
        run(simulation, A, retention=wish(80_000.0, name="t"))
    assert simulation.promises.num_promises == 1 and len(simulation.promises._ends) < 10


def test_a_release_ends_promises_of_one_name_and_tenant() -> None:
    simulation = RetainedSimulation(num_blocks=24)
    run(simulation, A, tenant="alice", retention=wish(name="s"))
    run(simulation, A, tenant="alice", retention=wish(name="t"))
    run(simulation, A, retention=wish(name="s"))
    assert simulation.release("s", "bob") == 0
    assert simulation.release("s", "alice") == 0, "the other name keeps them"
    assert simulation.release("t", "alice") == 4
    assert simulation.promises.num_blocks == 4
    assert simulation.release("s") == 4 and simulation.promises.num_blocks == 0
    assert simulation.release("s") == 0


def test_lost_workers_and_resets_end_all_promises() -> None:
    simulation = RetainedSimulation()
    run(simulation, A, retention=wish(1000.0))
    assert simulation.reset_prefix_cache()
    assert simulation.promises.num_promises == 0
    run(simulation, A, retention=wish(1000.0))
    simulation.fail()
    assert simulation.promises.num_promises == 0
    assert run(simulation, A).num_cached_tokens == 0


def test_an_aborted_request_keeps_what_was_computed() -> None:
    simulation = RetainedSimulation()
    group = simulation.submit(A, retention=wish(1000.0))
    simulation.plan()
    simulation.abort(group)
    simulation.drain()
    press(simulation)
    assert run(simulation, A).num_cached_tokens == 16


def test_the_first_token_says_what_is_kept() -> None:
    simulation = RetainedSimulation()
    (sequence,) = simulation.submit(A, retention=wish(), max_tokens=6)
    while not simulation.streams[sequence].deltas:
        simulation.step()
    assert simulation.streams[sequence].deltas[0].retained[0].num_tokens == 16
    simulation.drain()


def test_states_are_kept_beside_the_blocks() -> None:
    simulation = RetainedSimulation(num_blocks=24, num_states=8, checkpoint_tokens=8)
    sequence = run(simulation, A, retention=wish(1000.0))
    assert simulation.retained(sequence).num_tokens == 16
    run(simulation, B)
    press(simulation)
    assert run(simulation, A).num_cached_tokens == 16
    assert run(simulation, B).num_cached_tokens == 0


def test_a_part_of_a_prompt_has_states_of_its_own() -> None:
    simulation = RetainedSimulation(num_blocks=24, num_states=8, checkpoint_tokens=32)
    sequence = run(simulation, A, retention=wish(1000.0, num_tokens=9))
    assert simulation.retained(sequence).num_tokens == 8
    press(simulation)
    assert run(simulation, A).num_cached_tokens == 8


def test_states_have_a_limit_too() -> None:
    simulation = RetainedSimulation(num_blocks=40, num_states=4, checkpoint_tokens=8)
    assert simulation.promises.limits.num_states == 2
    sequences = [run(simulation, prompt, retention=wish(1000.0)) for prompt in (A, B, C)]
    assert [simulation.retained(sequence).num_tokens for sequence in sequences] == [16, 16, 0]
    refused = simulation.retained(sequences[2]).refusal
    assert refused == "of 2 state slots for promises, all are taken"


@pytest.mark.parametrize(
    ("share", "num_blocks", "caches", "why"),
    [(0.0, 16, True, "max-retained-share"), (1.0, 8, True, "one request"), (0.5, 16, False, "no prefix")],
)
def test_why_there_is_no_room(share: float, num_blocks: int, caches: bool, why: str) -> None:
    simulation = RetainedSimulation(share, num_blocks=num_blocks, share_prefixes=caches)
    refused = simulation.retained(run(simulation, A, retention=wish()))
    assert refused.num_tokens == 0 and why in refused.refusal


def test_limits_leave_room_for_the_longest_sequence() -> None:
    config = SchedulerConfig(num_blocks=100, block_size=4, max_model_len=320)
    assert RetentionLimits.of(config, 5, 0.5) == RetentionLimits(20, 2)
    assert RetentionLimits.of(config, 5, 0.1) == RetentionLimits(0, 0), "no states: no promise is kept"


def test_the_number_of_promises_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.engine_core.retention.promises.MAX_PROMISES", 3)
    simulation = RetainedSimulation()
    for name in "abc":
        assert not simulation.retained(run(simulation, A, retention=wish(name=name))).refusal
    assert "have not ended" in simulation.retained(run(simulation, A, retention=wish(name="d"))).refusal
    assert MAX_PROMISES > 100 and isinstance(simulation.promises, PrefixPromises)
