"""The scheduler, case by case. `Simulation` checks blocks, order, budgets and outputs after every event."""

from __future__ import annotations

import struct
from itertools import count
from typing import Any

import pytest

from pagewire.engine_core.schedule.scheduler import SchedulerConfig
from pagewire.engine_core.schedule.sequence import (
    Sequence,
    State,
    WeightsVersion,
)
from pagewire.ipc.suspicion import SEQUENCE_RULE
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.steps import NO_TOKEN, RowResult, StepPlan, StepResult
from tests.engine_core.schedule.simulation import EOS, VOCAB, Forced, Simulation, expected, expected_pooled

PICTURE = Tensor("uint8", (0,), b"")
LONG = list(range(2, 12)) * 3


def shape(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """Start, number of tokens and number of samples of each row."""
    assert plan is not None
    return [(row.start, row.num_tokens, row.num_samples) for row in plan.rows]


def served(simulation: Simulation) -> list[Sequence]:
    """The sequences of the step planned last."""
    return simulation.scheduler.in_flight[-1].sequences


def ending_at(simulation: Simulation, length: int, **fields: Any) -> Sequence:
    """A live request whose output ends with EOS as its `length`-th token."""
    for seed in count():
        trial = Simulation().submit([2, 3, 4], seed=seed, eos=EOS, max_tokens=9)[0]
        if len(expected(trial)[0]) == length and expected(trial)[1] == "stop":
            return simulation.submit([2, 3, 4], seed=seed, eos=EOS, max_tokens=9, **fields)[0]
    raise AssertionError


# ---------------------------------------------------------------- budget and chunks


def test_a_sequence_that_grows_long_is_computed_anew_and_stays_long() -> None:
    """Once, without the prefix that it had as a short one; then another long one finds its blocks."""
    simulation = Simulation(short_length=6, max_model_len=32, num_blocks=32, depth=1)
    (sequence,) = simulation.submit([2, 3, 4, 5], max_tokens=8)
    rows = []
    while simulation.live():
        if (plan := simulation.step()) is not None:
            rows += [(row.start, row.num_tokens) for row in plan.rows]
    assert rows == [(0, 4), (4, 1), (5, 1), (0, 7), (7, 1), (8, 1), (9, 1), (10, 1)]
    assert simulation.scheduler.stats.num_preemptions == 0
    (other,) = simulation.submit(sequence.token_ids[:10], max_tokens=1)
    simulation.drain()
    assert other.num_cached_tokens == 8


def test_a_prompt_in_one_step_then_a_token_per_step() -> None:
    simulation = Simulation(depth=1)
    simulation.submit([2, 3, 4, 5, 6], max_tokens=3)
    assert [shape(simulation.step()) for _ in range(3)] == [[(0, 5, True)], [(5, 1, True)], [(6, 1, True)]]
    assert simulation.step() is None


def test_a_long_prompt_is_chunked_and_draws_with_its_last_chunk() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=4)
    simulation.submit(LONG[:10])
    assert [shape(simulation.step()) for _ in range(3)] == [[(0, 4, False)], [(4, 4, False)], [(8, 2, True)]]


def test_concurrent_partial_prefills() -> None:
    """What the first prompt leaves of the budget goes to the second, in the same step."""
    simulation = Simulation(depth=1, max_num_batched_tokens=6)
    simulation.submit([2] * 8, max_tokens=2)
    simulation.submit([3] * 9, max_tokens=1)
    assert [shape(simulation.step()) for _ in range(3)] == [
        [(0, 6, False)],
        [(6, 2, True), (0, 4, False)],
        [(8, 1, True), (4, 5, True)],
    ]
    simulation.drain()


def test_running_requests_come_before_waiting_ones() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=4)
    first = simulation.submit([2, 3, 4, 5], max_tokens=5)[0]
    simulation.step()
    second = simulation.submit([6] * 10)[0]
    assert shape(simulation.step()) == [(4, 1, True), (0, 3, False)]
    assert [simulation.scheduler.running.index(r) for r in (first, second)] == [0, 1]


def test_chunks_of_one_prompt_overlap() -> None:
    simulation = Simulation(depth=2, max_num_batched_tokens=4)
    simulation.submit(LONG[:10])
    assert shape(simulation.plan()) == [(0, 4, False)]
    assert shape(simulation.plan()) == [(4, 4, False)]


def test_at_most_max_num_seqs_run() -> None:
    simulation = Simulation(depth=1, max_num_seqs=2)
    for _ in range(3):
        simulation.submit([2, 3], max_tokens=1)
    assert len(shape(simulation.step())) == 2
    assert len(shape(simulation.step())) == 1


def test_more_plans_than_depth_are_refused() -> None:
    simulation = Simulation(depth=1)
    simulation.submit([2])
    simulation.plan()
    with pytest.raises(RuntimeError, match="1 steps are in flight"):
        simulation.scheduler.plan(0.0)


def test_nothing_to_do() -> None:
    assert Simulation().plan() is None


def test_a_cache_that_cannot_hold_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match="lower max_model_len to 32"):
        SchedulerConfig(num_blocks=8, block_size=4, max_model_len=33)


def test_usage_and_counts() -> None:
    simulation = Simulation(depth=1, max_num_seqs=1)
    scheduler = simulation.scheduler
    simulation.submit([2] * 8, n=2, max_tokens=1)
    simulation.plan()
    assert (scheduler.sequences.num_waiting, scheduler.num_unfinished, scheduler.kv.usage) == (1, 2, 2 / 16)
    simulation.commit()
    simulation.drain()
    stats = scheduler.stats
    assert (stats.num_steps, stats.num_output_tokens, stats.num_preemptions) == (2, 2, 0)
    assert (stats.num_prefix_queries, stats.num_prefix_hits, stats.num_prompt_tokens) == (16, 4, 12)


# ---------------------------------------------------------------- lengths and stops


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_no_token_is_scheduled_past_max_tokens(depth: int, max_tokens: int) -> None:
    simulation = Simulation(depth=depth)
    request = simulation.submit([2, 3, 4], max_tokens=max_tokens)[0]
    simulation.drain()
    assert simulation.finish_reason(request) == "length"
    assert simulation.scheduler.stats.num_steps == max_tokens


def test_the_last_token_of_the_model_length_fits() -> None:
    simulation = Simulation(max_model_len=8, num_blocks=2, depth=2)
    request = simulation.submit([2, 3, 4], max_tokens=None)[0]
    simulation.drain()
    assert len(simulation.output(request)) == 5


@pytest.mark.parametrize(("depth", "num_wasted"), [(1, 0), (2, 1)])
def test_an_end_by_eos_wastes_one_row_at_depth_2(depth: int, num_wasted: int) -> None:
    simulation = Simulation(depth=depth)
    request = ending_at(simulation, 3)
    simulation.drain()
    assert simulation.finish_reason(request) == "stop" and simulation.output(request)[-1] == EOS
    assert simulation.scheduler.stats.num_steps == 3 + num_wasted
    assert simulation.scheduler.stats.num_output_tokens == 3


def test_the_next_token_is_planned_before_the_last_is_known() -> None:
    simulation = Simulation(depth=2)
    simulation.submit([2, 3, 4], max_tokens=3)
    assert shape(simulation.plan()) == [(0, 3, True)]
    assert shape(simulation.plan()) == [(3, 1, True)]
    simulation.commit()
    assert shape(simulation.plan()) == [(4, 1, True)]
    simulation.commit()
    assert simulation.plan() is None  # the third and last is in flight


def run_all(depth: int, num_blocks: int) -> list[list[int]]:
    simulation = Simulation(depth=depth, num_blocks=num_blocks, max_num_batched_tokens=7, max_num_seqs=3)
    for seed in range(12):
        prompt = LONG[: 3 + seed % 5 * 3]
        simulation.submit(prompt, seed=seed, eos=EOS, max_tokens=1 + seed, n=1 + seed % 2)
    simulation.drain()
    assert simulation.scheduler.stats.num_preemptions > 0 or num_blocks > 8
    return [simulation.output(request) for request in simulation.streams]


def test_depth_and_memory_change_no_output() -> None:
    outputs = run_all(depth=1, num_blocks=100)
    assert outputs == run_all(depth=2, num_blocks=100)
    assert outputs == run_all(depth=1, num_blocks=8) == run_all(depth=2, num_blocks=8)


# ---------------------------------------------------------------- prefix cache


def test_equal_prompts_in_one_step_share_blocks() -> None:
    simulation = Simulation(depth=1)
    first, second = simulation.submit(LONG[:9])[0], simulation.submit(LONG[:9])[0]
    assert shape(simulation.plan()) == [(0, 9, True), (8, 1, True)]
    assert simulation.block_ids(first)[:2] == simulation.block_ids(second)[:2]
    assert simulation.block_ids(first)[2] != simulation.block_ids(second)[2]


def test_a_chunked_prompt_is_shared_as_far_as_it_is_launched() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=7)
    simulation.submit(LONG[:6], max_tokens=1)
    simulation.submit(LONG[:6], max_tokens=1)
    assert shape(simulation.plan()) == [(0, 6, True), (4, 1, False)]


def test_the_whole_prompt_but_its_last_token_may_come_from_the_cache() -> None:
    simulation = Simulation(depth=1)
    simulation.submit(LONG[:8])
    simulation.drain()
    again = simulation.submit(LONG[:8])[0]
    assert shape(simulation.plan()) == [(4, 4, True)]
    simulation.commit()
    assert simulation.streams[again].deltas[0].num_cached_tokens == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_are_cached_too(depth: int) -> None:
    simulation = Simulation(depth=depth)
    request = simulation.submit(LONG[:3], max_tokens=6)[0]
    simulation.drain()
    assert len(request.token_ids) == 9  # KV of 8: two full blocks
    simulation.submit([*request.token_ids, 5])
    assert shape(simulation.plan()) == [(8, 2, True)]


def test_blocks_come_back_and_are_taken_in_exact_order() -> None:
    simulation = Simulation(depth=1, num_blocks=8)
    first = simulation.submit(LONG[:13], max_tokens=1)[0]
    simulation.plan()
    assert simulation.block_ids(first) == [0, 1, 2, 3]
    simulation.commit()
    assert list(simulation.scheduler.kv.pool.free_order()) == [3, 4, 5, 6, 7, 2, 1, 0]
    second = simulation.submit([11] * 25, max_tokens=1)[0]
    simulation.plan()
    assert simulation.block_ids(second) == [3, 4, 5, 6, 7, 2, 1]
    assert simulation.scheduler.kv.pool.num_evictions == 2


def test_the_least_recently_used_prefix_is_evicted() -> None:
    simulation = Simulation(depth=1, num_blocks=8)
    for prompt in ([2] * 9, [3] * 9, [2] * 9, [4] * 20):
        simulation.submit(prompt, max_tokens=1)
        simulation.drain()
    simulation.submit([2] * 9, max_tokens=1)
    simulation.submit([3] * 9, max_tokens=1)
    assert shape(simulation.plan()) == [(8, 1, True), (0, 9, True)]


def test_salts_are_isolated() -> None:
    simulation = Simulation(depth=1)
    for salt in ("a", "b", None, "a"):
        simulation.submit(LONG[:9], salt=salt)
    assert [start for start, _, _ in shape(simulation.plan())] == [0, 0, 0, 8]


def test_without_shared_prefixes_only_the_sequences_of_one_request_share() -> None:
    simulation = Simulation(depth=1, share_prefixes=False)
    simulation.submit(LONG[:9], n=2)
    simulation.submit(LONG[:9], n=2)
    assert [start for start, _, _ in shape(simulation.plan())] == [0, 8, 0, 8]


def test_resetting_the_prefix_cache_forgets_all() -> None:
    simulation = Simulation(depth=1)
    simulation.submit(LONG[:9], max_tokens=1)
    simulation.plan()
    assert not simulation.reset_prefix_cache()
    simulation.commit()
    assert simulation.reset_prefix_cache()
    simulation.submit(LONG[:9], max_tokens=1)
    assert shape(simulation.plan()) == [(0, 9, True)]


# ---------------------------------------------------------------- prompt log probabilities


def test_prompt_logprobs_come_in_chunks_and_read_no_cache() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=4)
    simulation.submit(LONG[:10], max_tokens=1)
    simulation.drain()
    request = simulation.submit(LONG[:10], prompt_logprobs=0, max_tokens=1)[0]
    plans = [simulation.step() for _ in range(3)]
    assert [shape(plan) for plan in plans] == [[(0, 4, False)], [(4, 4, False)], [(8, 2, True)]]
    assert [plan.rows[0].num_prompt_logprobs for plan in plans if plan] == [4, 4, 1]
    deltas = simulation.streams[request].deltas
    assert [delta.prompt_logprobs.token_ids.tolist() for delta in deltas if delta.prompt_logprobs] == [
        LONG[1:5],
        LONG[5:9],
        LONG[9:10],
    ]
    assert deltas[-1].num_cached_tokens == 0


def test_prompt_logprobs_are_asked_for_once_among_n_sequences() -> None:
    simulation = Simulation(depth=1)
    simulation.submit(LONG[:10], prompt_logprobs=0, n=3)
    plan = simulation.plan()
    assert plan is not None
    assert [(row.start, row.num_prompt_logprobs) for row in plan.rows] == [(0, 9), (8, 0), (8, 0)]


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_already_returned_are_not_returned_again(depth: int) -> None:
    simulation = Simulation(depth=depth, max_num_batched_tokens=4)
    request = simulation.submit(LONG[:10], prompt_logprobs=0, max_tokens=2)[0]
    simulation.plan()
    simulation.commit()
    if depth == 2:
        simulation.plan()
    simulation.fail()
    plans = [simulation.plan()]
    simulation.commit()
    plans.append(simulation.plan())
    assert [plan.rows[0].num_prompt_logprobs for plan in plans if plan] == [0, 4]
    simulation.commit()
    simulation.drain()
    assert simulation.streams[request].prompt_logprobs == LONG[1:10]


def test_what_was_returned_is_recomputed_in_a_chunk_of_its_own() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=6)
    simulation.submit([2] * 2, max_tokens=1)
    request = simulation.submit(LONG[:10], prompt_logprobs=0)[0]
    simulation.step()
    assert simulation.streams[request].prompt_logprobs == LONG[1:5]
    assert simulation.preempt_all()
    assert [shape(simulation.step()) for _ in range(2)] == [[(0, 4, False)], [(4, 6, True)]]
    assert simulation.streams[request].prompt_logprobs == LONG[1:10]


@pytest.mark.parametrize("delivered", range(10))
@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_that_a_lost_core_delivered_are_not_returned_again(
    depth: int, delivered: int
) -> None:
    simulation = Simulation(depth=depth, max_num_batched_tokens=4)
    fields: dict[str, Any] = {"prompt_logprobs": 0, "n": 2, "max_tokens": 6}
    first, second = simulation.submit(LONG[:10], num_prompt_logprobs=delivered, **fields)
    simulation.drain()
    rows = [delta.prompt_logprobs for delta in simulation.streams[first].deltas if delta.prompt_logprobs]
    assert [token_id for row in rows for token_id in row.token_ids.tolist()] == LONG[1 + delivered : 10]
    assert simulation.streams[first].prompt_logprobs == LONG[1:10]
    assert not any(delta.prompt_logprobs for delta in simulation.streams[second].deltas)


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    simulation = Simulation(depth=1)
    request = simulation.submit([2], prompt_logprobs=0)[0]
    simulation.drain()
    assert all(delta.prompt_logprobs is None for delta in simulation.streams[request].deltas)


# ---------------------------------------------------------------- memory runs out


def crowd(simulation: Simulation, **fields: Any) -> list[Sequence]:
    """Two requests that together outgrow 8 blocks."""
    return [simulation.submit([i] * 8, max_tokens=24, **fields)[0] for i in (2, 3)]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_latest_is_preempted_and_resumes(depth: int) -> None:
    simulation = Simulation(depth=depth, num_blocks=8)
    first, second = crowd(simulation)
    while not simulation.scheduler.stats.num_preemptions:
        simulation.step()
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    assert simulation.output(second)  # it had begun
    simulation.drain()
    assert [simulation.finish_reason(r) for r in (first, second)] == ["length"] * 2


def test_nothing_is_admitted_in_the_step_that_preempts() -> None:
    simulation = Simulation(depth=1, num_blocks=8)
    crowd(simulation)
    small = simulation.submit([4], max_tokens=20)[0]
    while not simulation.scheduler.stats.num_preemptions:
        simulation.step()
    assert small.state is State.WAITING  # it was the latest
    simulation.drain()


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    simulation = Simulation(depth=1, num_blocks=8)
    request = simulation.submit(LONG[:9], max_tokens=6)[0]
    for _ in range(3):
        simulation.step()
    assert simulation.preempt_all()
    assert request.state is State.WAITING and request.num_output_tokens == 3
    assert shape(simulation.plan()) == [(8, 4, True)]
    simulation.commit()
    simulation.drain()
    assert simulation.streams[request].deltas[-1].num_cached_tokens == 0  # as it was when it began


def test_preempting_all_waits_for_what_is_in_flight() -> None:
    simulation = Simulation(depth=2)
    request = simulation.submit([2, 3])[0]
    simulation.plan()
    assert not simulation.preempt_all() and request.state is State.RUNNING


@pytest.mark.parametrize("depth", [1, 2])
def test_the_lowest_priority_is_preempted_first(depth: int) -> None:
    simulation = Simulation(depth=depth, num_blocks=8, policy="priority")
    low = simulation.submit([2] * 8, max_tokens=24, priority=5)[0]
    high = simulation.submit([3] * 8, max_tokens=24, priority=1)[0]
    while not simulation.scheduler.stats.num_preemptions:
        simulation.step()
    assert (low.state, high.state) == (State.WAITING, State.RUNNING)
    simulation.drain()


def test_priorities_order_admission_and_arrival_breaks_ties() -> None:
    simulation = Simulation(depth=1, max_num_seqs=2, policy="priority")
    low, high, high_too, highest = (
        simulation.submit([i], priority=p, max_tokens=1)[0] for i, p in enumerate([3, 1, 1, -2], start=2)
    )
    simulation.plan()
    assert served(simulation) == [highest, high]
    simulation.commit()
    simulation.plan()
    assert served(simulation) == [high_too, low]


def test_first_come_first_served_whatever_the_priority() -> None:
    simulation = Simulation(depth=1, max_num_seqs=1)
    first = simulation.submit([2], priority=9)[0]
    simulation.submit([3], priority=0)
    simulation.plan()
    assert served(simulation) == [first]


def test_the_head_of_the_queue_is_not_passed_by_one_that_would_fit() -> None:
    simulation = Simulation(depth=1, num_blocks=8)
    simulation.submit([2] * 16, max_tokens=9)
    simulation.step()
    big, small = simulation.submit([3] * 20)[0], simulation.submit([4])[0]
    simulation.plan()
    assert (big.state, small.state) == (State.WAITING, State.WAITING)


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, 2), (0.25, 2), (0.5, 1)])
def test_the_watermark_stays_free_at_admission(watermark: float, admitted: int) -> None:
    simulation = Simulation(depth=1, num_blocks=8, watermark=watermark)
    simulation.submit([2] * 12)
    simulation.submit([3] * 12)
    assert len(shape(simulation.plan())) == admitted


def test_alone_a_request_may_take_all_blocks() -> None:
    simulation = Simulation(depth=1, num_blocks=8, watermark=0.5)
    simulation.submit([2] * 31, max_tokens=1)
    assert shape(simulation.plan()) == [(0, 31, True)]


# ---------------------------------------------------------------- aborts


def test_aborted_while_waiting() -> None:
    simulation = Simulation(depth=1, max_num_seqs=1)
    first, second, third = (simulation.submit([i])[0] for i in (2, 3, 4))
    simulation.plan()
    simulation.abort([second])
    simulation.abort([second])
    assert simulation.scheduler.sequences.num_waiting == 1
    simulation.commit()
    simulation.drain()
    assert [len(simulation.output(r)) for r in (first, second, third)] == [4, 0, 4]


@pytest.mark.parametrize("depth", [1, 2])
def test_aborted_in_flight(depth: int) -> None:
    """The late token is dropped; blocks and slot are another's at once."""
    simulation = Simulation(depth=depth, max_num_seqs=1)
    request = simulation.submit([2, 3, 4])[0]
    for _ in range(depth):
        simulation.plan()
    simulation.abort([request])
    assert simulation.scheduler.kv.pool.num_free == 16
    assert simulation.scheduler.num_unfinished == 0
    for _ in range(depth):
        assert simulation.commit() == []
    assert simulation.output(request) == []


def test_an_aborted_requests_blocks_are_reused_behind_its_step() -> None:
    simulation = Simulation(depth=2, num_blocks=8, max_num_seqs=1)
    request = simulation.submit([2] * 5)[0]
    simulation.plan()
    slot, blocks = request.slot, simulation.block_ids(request)
    simulation.abort([request])
    simulation.submit([3] * 30, max_tokens=2)
    plan = simulation.plan()
    assert plan is not None and plan.freed_slots == [slot] == [plan.inits[0].slot]
    assert set(blocks) <= set(plan.inits[0].block_ids)
    simulation.drain()


# ---------------------------------------------------------------- results that do not fit


def test_a_result_of_another_step_is_refused() -> None:
    simulation = Simulation(depth=2)
    simulation.submit([2, 3])
    simulation.plan()
    simulation.plan()
    for wrong in (StepResult(1, [RowResult([2])]), StepResult(7, [RowResult([2])])):
        with pytest.raises(ValueError, match=f"result of step {wrong.step_id}"):
            simulation.scheduler.commit(wrong, 0.0)
    simulation.drain()


def test_a_result_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step 0"):
        Simulation().scheduler.commit(StepResult(0, []), 0.0)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "step 0 of 2 rows returned 0"),
        ([RowResult([2])], "step 0 of 2 rows returned 1"),
        ([RowResult([2]), RowResult()], "a row of 1 samples returned 0 tokens"),
        ([RowResult([2]), RowResult([2, 3])], "a row of 1 samples returned 2 tokens"),
        ([RowResult([2]), RowResult([2], pooled=PICTURE)], "a pooled result without need"),
    ],
)
def test_a_result_that_does_not_fit_its_rows_is_refused_whole(rows: list[RowResult], text: str) -> None:
    simulation = Simulation(depth=1)
    simulation.submit([2, 3])
    simulation.submit([4, 5])
    simulation.plan()
    for result in (StepResult(0, rows), StepResult(0, rows).by_columns()):
        with pytest.raises(ValueError, match=text):
            simulation.scheduler.commit(result, 0.0)
    simulation.drain()


@pytest.mark.parametrize(
    "wrong",
    [
        StepResult(0, [RowResult([2])], token_ids=[2]),
        StepResult(0, [RowResult([2]), RowResult([2])], token_ids=[2, 2]),
        StepResult(0, [RowResult([2]), RowResult([2])], others={0: RowResult([2])}),
        StepResult(0, token_ids=[2, 2], others={1: RowResult([2])}),
        StepResult(0, token_ids=[2, NO_TOKEN]),
        StepResult(0, token_ids=[2, NO_TOKEN], others={2: RowResult([2])}),
        StepResult(0, token_ids=[2, NO_TOKEN], others={-1: RowResult([2])}),
    ],
)
def test_columns_that_disagree_are_refused_whole(wrong: StepResult) -> None:
    simulation = Simulation(depth=1)
    simulation.submit([2, 3])
    simulation.submit([4, 5])
    simulation.plan()
    with pytest.raises(ValueError, match="columns"):
        simulation.scheduler.commit(wrong, 0.0)
    simulation.drain()


def test_a_prompt_in_parts_cannot_return_a_token() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=4)
    simulation.submit([2, 3, 4, 5, 6])
    simulation.plan()
    with pytest.raises(ValueError, match="a row of 0 samples returned 1 tokens"):
        simulation.scheduler.commit(StepResult(0, token_ids=[2]), 0.0)
    simulation.drain()


def test_most_tokens_of_a_sequence_are_outcomes_without_a_delta() -> None:
    """All but the first two, the last one, and those that fill one of the 12 blocks."""
    simulation = Simulation(block_size=16, max_model_len=256)
    (sequence,) = simulation.submit([3, 4], max_tokens=200, ignore_eos=True)
    scheduler, num_plain = simulation.scheduler, 0
    for step in range(200):
        plan = scheduler.plan(float(step))
        assert plan is not None and len(plan.rows) == 1
        outcomes = scheduler.commit(StepResult(plan.step_id, token_ids=[2]), float(step))
        num_plain += len(outcomes.sequences)
        assert [delta.token_ids for _, delta in outcomes] == [[2]]
    assert sequence.finished and sequence.output_token_ids == [2] * 200
    assert scheduler.stats.num_output_tokens == 200
    assert num_plain == 185


# ---------------------------------------------------------------- drafts


class ListedDrafter(Forced):
    """Proposes given lists, one after the other, then nothing."""

    def __init__(self, *drafts: list[int]) -> None:
        super().__init__()
        self.drafts, self.limits = list(drafts), list[int]()

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        self.limits.append(limit)
        return self.drafts.pop(0) if self.drafts else []


def true_output(prompt: list[int], **params: int) -> list[int]:
    return expected(Simulation().submit(prompt, **params)[0])[0]


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_drafts_count_up_to_the_first_wrong_one(num_right: int) -> None:
    output = true_output([2, 3, 4], max_tokens=9)
    drafts = [*output[1 : 1 + num_right], *((token_id + 1) % VOCAB for token_id in output[1 + num_right : 4])]
    drafter = ListedDrafter(drafts)
    simulation = Simulation(depth=1, drafter=drafter)
    (sequence,) = simulation.submit([2, 3, 4], max_tokens=9)
    simulation.step()
    plan = simulation.step()
    assert plan is not None
    assert [(row.start, row.num_tokens, row.drafts, row.num_samples) for row in plan.rows] == [
        (3, 4, drafts, 4)
    ]
    assert simulation.output(sequence) == output[: 2 + num_right]
    assert sequence.computed == 4 + num_right == len(sequence.token_ids) - 1
    simulation.drain()
    assert simulation.output(sequence) == output


def test_a_sequence_with_drafts_in_flight_is_not_planned_again() -> None:
    simulation = Simulation(depth=2, drafter=ListedDrafter([5, 6]))
    (drafted,) = simulation.submit([2, 3, 4], max_tokens=9)
    (other,) = simulation.submit([5, 6, 7], max_tokens=9)
    simulation.plan()
    simulation.commit()
    assert simulation.slots_of(simulation.plan()) == [drafted.slot, other.slot]
    assert simulation.slots_of(simulation.plan()) == [other.slot]
    simulation.drain()


def test_tokens_behind_the_end_do_not_count() -> None:
    output = true_output([2, 3, 4], max_tokens=9)
    simulation = Simulation(depth=1, drafter=ListedDrafter(output[1:5]))
    (sequence,) = simulation.submit([2, 3, 4], max_tokens=9, stop_token_ids=[output[2]])
    simulation.drain()
    end = output.index(output[2]) + 1
    assert simulation.output(sequence) == output[:end] and simulation.finish_reason(sequence) == "stop"


def test_drafts_are_limited_by_budget_length_and_blocks() -> None:
    drafter = ListedDrafter([2] * 30, [2] * 30)
    simulation = Simulation(
        depth=1, drafter=drafter, max_num_batched_tokens=8, max_model_len=16, num_blocks=4
    )
    simulation.submit([2, 3, 4], max_tokens=5)
    simulation.step()
    assert (plan := simulation.step()) is not None and drafter.limits == [3]  # 5 tokens, 1 known, 1 sampled
    assert len(plan.rows[0].drafts) == 3
    simulation.drain()


def test_drafts_never_preempt() -> None:
    drafter = ListedDrafter(*([2] * 30 for _ in range(20)))
    simulation = Simulation(depth=1, drafter=drafter, num_blocks=8, max_model_len=32)
    simulation.submit([2] * 11, max_tokens=4)
    simulation.submit([3] * 11, max_tokens=4)
    simulation.drain()
    assert simulation.scheduler.stats.num_preemptions == 0


# ---------------------------------------------------------------- pooling and media


@pytest.mark.parametrize("all_tokens", [False, True])
def test_a_pooled_prompt_runs_in_chunks_samples_nothing_and_ends(all_tokens: bool) -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=4)
    (sequence,) = simulation.submit(range(2, 12), pool=PoolingParams(all_tokens=all_tokens))
    plans = [simulation.step() for _ in range(4)]
    rows = [row for plan in plans if plan is not None for row in plan.rows]
    assert [(row.start, row.num_tokens, row.num_samples, row.pool) for row in rows] == [
        (0, 4, 0, True),
        (4, 4, 0, True),
        (8, 2, 0, True),
    ]
    last = simulation.streams[sequence].last
    assert last is not None and last.pooled == expected_pooled(sequence) and last.timing is not None
    simulation.drain()


def test_a_result_of_all_tokens_skips_no_cached_prefix() -> None:
    simulation = Simulation(depth=1)
    simulation.submit(range(2, 12))
    simulation.drain()
    cached = []
    for all_tokens in (False, True):
        # Without parameters that say so, a pooled prompt shares the cache of the one that generated.
        (sequence,) = simulation.submit(range(2, 12), pool=PoolingParams(all_tokens=all_tokens))
        cached.append(len(simulation.scheduler.kv.cached_prefix(sequence)))
    assert cached == [2, 0]
    simulation.drain()


@pytest.mark.parametrize("media", [[], [Media(1, 2, b"cat", PICTURE)]])
def test_numbers_that_are_not_finite_are_the_fault_of_media(media: list[Media]) -> None:
    """Whose content is the client's; without any, the fault is the model's."""
    simulation = Simulation()
    (sequence,) = simulation.submit([2, 2, 2, 4], media=media)
    simulation.plan()
    simulation.results[0].rows[0] = RowResult(error="no logits", error_type="NotFiniteError")
    ((ended, delta),) = simulation.commit()
    assert ended is sequence and delta.finish_reason == "error"
    assert delta.error_type == ("ValueError" if media else "NotFiniteError")
    assert (delta.error or "").startswith("no logits")


@pytest.mark.parametrize("num_states", [0, 8])
def test_what_a_medium_that_cannot_be_encoded_has_left_is_found_by_nobody(num_states: int) -> None:
    """Its row has written keys and values all the same, and other requests may have them in their prefix."""
    simulation = Simulation(num_states=num_states, checkpoint_tokens=4, encoder_capacity=20)
    prompt, media = [5, *[2] * 6, 7, 8, 9, 10, 11, 5], [Media(1, 6, b"cat", PICTURE)]
    (other,) = simulation.submit(prompt[7:] * 2)
    (first,) = simulation.submit(prompt, media=media)
    (second,) = simulation.submit(prompt, media=media)
    simulation.plan()
    names = [row.slot for row in simulation.scheduler.in_flight[0].rows if row.entries]
    assert names == [first.slot]
    simulation.plan()
    shared = second.num_cached_tokens
    simulation.results[0].rows[1] = RowResult(error="this is no cat", is_spoiled=True)
    ended = {sequence: delta for sequence, delta in simulation.commit() if delta.finish_reason == "error"}
    assert {delta.error for delta in ended.values()} == {"this is no cat"}
    assert set(ended) == ({first, second} if shared else {first})
    simulation.drain()
    assert other.finished and other.num_output_tokens
    (again,) = simulation.submit(prompt, media=media)
    assert simulation.scheduler.kv.cached_prefix(again) == []
    simulation.drain()


def test_an_error_of_a_draw_ends_nobody_who_shares_the_medium() -> None:
    simulation = Simulation(encoder_capacity=20)
    prompt, media = [5, *[2] * 6, 7, 8, 9, 10, 11, 5], [Media(1, 6, b"cat", PICTURE)]
    (first,) = simulation.submit(prompt, media=media)
    (second,) = simulation.submit(prompt, media=media)
    simulation.plan()
    assert second.num_cached_tokens
    simulation.results[0].rows[0] = RowResult(error="no token is allowed", error_type="ValueError")
    assert [sequence for sequence, delta in simulation.commit() if delta.finish_reason == "error"] == [first]
    simulation.drain()
    assert second.num_output_tokens


def test_a_chunk_ends_before_a_medium_that_does_not_fit() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=6)
    simulation.submit([2, 3, 4, *[2] * 5, 7], media=[Media(3, 5, b"cat", PICTURE)])
    assert shape(simulation.step()) == [(0, 3, 0)]
    assert shape(simulation.step()) == [(3, 6, 1)]
    simulation.drain()


def test_nothing_passes_a_medium_that_waits_for_room() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=6)
    simulation.submit([2, 3], max_tokens=4)
    (first,) = simulation.submit([9, *[2] * 6, 7], media=[Media(1, 6, b"cat", PICTURE)])
    (second,) = simulation.submit([8, 8], max_tokens=1)
    simulation.step()
    assert simulation.slots_of(simulation.step()) == [
        0
    ]  # a token of the first request leaves room for 5 of 6
    simulation.drain()
    assert simulation.finish_reason(first) == simulation.finish_reason(second) == "length"


def test_a_cached_prefix_never_ends_within_a_medium() -> None:
    simulation = Simulation(depth=1)
    prompt, media = [5, 5, 5, *[2] * 7, 5, 5, 5], [Media(3, 7, b"cat", PICTURE)]
    simulation.submit(prompt, media=media)
    simulation.drain()
    found = []
    for length in (9, 10, 13):  # the last token is always computed: 2, 2 and 3 blocks are in the cache
        (again,) = simulation.submit(prompt[:length], media=[Media(3, min(7, length - 3), b"cat", PICTURE)])
        found.append(len(simulation.scheduler.kv.cached_prefix(again)))
    assert found == [0, 0, 3]
    simulation.drain()


def test_embeddings_are_cut_anywhere_and_go_with_the_rows_that_run_them() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=4)
    data = Tensor("float16", (9, 1), struct.pack("9e", *range(9)))
    prompt, media = [3, 3, *[2] * 9, 5, 5], [Media(2, 9, b"cat", data, True)]
    simulation.submit(prompt, media=media)
    brought = []
    for _ in range(4):
        plan = simulation.step()
        assert plan is not None
        assert all(medium.data.shape == (0,) for init in plan.inits for medium in init.media)
        brought += [(row.start, [(m.start, m.num_tokens) for m in row.media]) for row in plan.rows]
    assert brought == [(0, [(2, 2)]), (4, [(4, 4)]), (8, [(8, 3)]), (12, [])]
    simulation.drain()
    (again,) = simulation.submit(prompt, media=media)
    assert len(simulation.scheduler.kv.cached_prefix(again)) == 3
    (other,) = simulation.submit(prompt, media=[Media(2, 9, b"dog", data, True)])
    assert simulation.scheduler.kv.cached_prefix(other) == []
    simulation.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_error_ends_that_request_alone(depth: int) -> None:
    simulation = Simulation(depth=depth)
    requests = [simulation.submit([i, i, i])[0] for i in (2, 3, 4)]
    for _ in range(depth):
        simulation.plan()
    simulation.commit(errors={1: "logits are not finite"})
    last = simulation.streams[requests[1]].last
    assert last is not None and (last.finish_reason, last.error) == ("error", "logits are not finite")
    simulation.drain()
    assert [len(simulation.output(request)) for request in requests] == [4, 0, 4]


def test_a_chunk_may_fail_too() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=2)
    request = simulation.submit([2, 3, 4])[0]
    simulation.plan()
    simulation.commit(errors={0: "why"})
    assert simulation.finish_reason(request) == "error"
    simulation.drain()


# ---------------------------------------------------------------- the worker dies


def crash(simulation: Simulation, times: int = 1) -> None:
    for _ in range(times):
        assert simulation.plan() is not None
        simulation.fail()


@pytest.mark.parametrize("depth", [1, 2])
def test_after_a_crash_all_is_recomputed_and_goes_on(depth: int) -> None:
    simulation = Simulation(depth=depth)
    requests = [simulation.submit(LONG[:9], seed=i, max_tokens=6)[0] for i in range(3)]
    for _ in range(3):
        simulation.step()
    if not simulation.results:
        simulation.plan()
    simulation.fail()
    assert not simulation.scheduler.kv.pool.named
    plan = simulation.plan()
    assert plan is not None and plan.freed_slots == []
    assert plan.rows[0].start == 0 and plan.inits[0].token_ids == requests[0].token_ids
    simulation.drain()
    assert [len(simulation.output(request)) for request in requests] == [6, 6, 6]


def test_after_two_crashes_a_request_runs_alone_and_a_third_ends_it() -> None:
    simulation = Simulation(depth=2)
    poison = simulation.submit([2, 3])[0]
    crash(simulation)
    others = [simulation.submit([i, i])[0] for i in (4, 5)]
    crash(simulation)
    simulation.plan()
    assert served(simulation) == [poison]
    simulation.plan()
    assert served(simulation) == [poison]
    outcomes = simulation.fail()
    assert [request for request, _ in outcomes] == [poison]
    assert "crashed 3 times" in (outcomes[0][1].error or "")
    simulation.plan()
    assert served(simulation) == others  # with one crash behind them, together
    simulation.drain()
    assert [len(simulation.output(request)) for request in others] == [4, 4]


def test_suspects_are_tried_one_after_another() -> None:
    simulation = Simulation(depth=1)
    first, second = simulation.submit([2, 3])[0], simulation.submit([4, 5])[0]
    crash(simulation, 2)
    simulation.plan()
    assert served(simulation) == [first]
    simulation.fail()
    simulation.plan()
    assert served(simulation) == [second]
    simulation.commit()
    simulation.drain()
    assert (simulation.finish_reason(first), simulation.finish_reason(second)) == ("error", "length")


def test_who_is_cleared_waits_for_those_that_are_still_to_be_tried() -> None:
    """A trial takes as long as a token, and not as long as a request: nobody else runs meanwhile."""
    simulation = Simulation(depth=2)
    requests = [simulation.submit([i, i], max_tokens=50)[0] for i in range(2, 5)]
    crash(simulation, 2)
    requests += simulation.submit([9], max_tokens=50)
    tried = []
    while any(request.suspect for request in requests):
        assert len(tried) < 9
        while len(simulation.scheduler.in_flight) < 2 and simulation.plan() is not None:
            tried.append(served(simulation))
        simulation.commit()
    assert all(len(step) == 1 for step in tried)
    assert {request for step in tried for request in step} == set(requests[:3])
    simulation.drain()
    assert {simulation.finish_reason(request) for request in requests} == {"length"}


def test_a_token_proves_a_suspect_innocent() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=4)
    request = simulation.submit([2] * 6)[0]
    crash(simulation, 2)
    other = simulation.submit([3])[0]
    simulation.step()
    simulation.plan()
    assert served(simulation) == [request]  # still alone: half a prompt proves nothing
    simulation.commit()
    assert request.suspicion.num_in_row == 0
    simulation.plan()
    assert served(simulation) == [request, other]
    simulation.commit()
    crash(simulation, 2)
    simulation.drain()
    assert simulation.finish_reason(request) == "length"


def test_crashes_with_tokens_in_between_isolate_and_end_a_request() -> None:
    simulation = Simulation(depth=1)
    request, other = simulation.submit([2, 3], max_tokens=50)[0], simulation.submit([4, 5], max_tokens=50)[0]
    for _ in range(SEQUENCE_RULE.suspect_in_all):
        simulation.step()
        crash(simulation)
    simulation.plan()
    assert served(simulation) == [request]
    simulation.commit()
    crash(simulation)
    simulation.plan()
    assert served(simulation) == [request], "a token clears it"
    simulation.commit()
    crash(simulation)
    simulation.drain()
    assert simulation.finish_reason(request) == "error"
    assert simulation.finish_reason(other) == "length"


def test_steps_alone_clear_a_request_of_its_crashes() -> None:
    simulation = Simulation(depth=1)
    request = simulation.submit([2, 3], max_tokens=50)[0]
    for _ in range(SEQUENCE_RULE.suspect_in_all):
        simulation.step()
        crash(simulation)
    other = simulation.submit([4, 5], max_tokens=50)[0]
    for _ in range(SEQUENCE_RULE.clear_after):
        simulation.plan()
        assert served(simulation) == [request]
        simulation.commit()
    simulation.plan()
    assert served(simulation) == [request, other]
    simulation.commit()
    simulation.drain()
    assert {simulation.finish_reason(request), simulation.finish_reason(other)} == {"length"}


def test_a_suspect_waits_until_a_dropped_row_has_returned() -> None:
    """A request that was aborted, or ended by EOS, may still have a row in flight, which may crash too."""
    simulation = Simulation(depth=2)
    suspect, other = simulation.submit([2, 3])[0], simulation.submit([4, 5])[0]
    crash(simulation, 2)
    simulation.plan()
    simulation.abort([suspect])
    assert simulation.plan() is None
    simulation.fail()
    assert other.suspicion.num_in_row == 2 and simulation.streams[other].last is None
    simulation.plan()
    assert served(simulation) == [other]


def test_those_not_in_flight_at_the_crash_are_not_blamed() -> None:
    simulation = Simulation(depth=1, max_num_seqs=1)
    first, second = simulation.submit([2])[0], simulation.submit([3])[0]
    crash(simulation)
    assert (first.suspicion.num_in_row, second.suspicion.num_in_row) == (1, 0)


def test_a_crash_with_nothing_in_flight_blames_nobody() -> None:
    simulation = Simulation(depth=1)
    request = simulation.submit([2, 3])[0]
    simulation.step()
    for _ in range(4):
        assert simulation.fail() == []
    assert request.suspicion.num_in_row == 0
    simulation.drain()


def test_two_steps_of_a_request_in_one_crash_count_once() -> None:
    simulation = Simulation(depth=2)
    request = simulation.submit([2, 3])[0]
    simulation.plan()
    simulation.plan()
    simulation.fail()
    assert request.suspicion.num_in_row == 1


def test_a_suspect_can_be_aborted() -> None:
    simulation = Simulation(depth=1)
    suspect, other = simulation.submit([2])[0], simulation.submit([3])[0]
    crash(simulation, 2)
    simulation.abort([suspect])
    assert simulation.scheduler.waiting.suspects == [other]
    simulation.drain()
    assert simulation.finish_reason(other) == "length"


def test_a_suspect_can_be_preempted() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=2)
    suspect = simulation.submit([2, 3, 4])[0]
    crash(simulation, 2)
    simulation.step()
    assert simulation.preempt_all() and simulation.scheduler.waiting.suspects == [suspect]
    simulation.drain()


def test_aborted_requests_do_not_pile_up_behind_one_that_waits() -> None:
    """The place of an aborted request in the queue is freed even if it never comes to the front."""
    simulation = Simulation(depth=1, max_num_seqs=1)
    simulation.submit([2, 3], max_tokens=9)
    simulation.step()
    simulation.submit([4, 5], max_tokens=2)
    for _ in range(1000):
        simulation.abort(simulation.submit([6, 7], max_tokens=2))
    assert simulation.scheduler.sequences.num_waiting == 1
    assert sum(map(len, simulation.scheduler.waiting._heaps.values())) < 100
    simulation.drain()


# ---------------------------------------------------------------- other weights


def test_blocks_of_other_weights_are_not_found() -> None:
    simulation = Simulation(depth=1)

    def cached() -> int | None:
        (sequence,) = simulation.submit(LONG[:10], max_tokens=1)
        simulation.drain()
        return sequence.num_cached_tokens

    assert cached() == 0
    assert (first := cached())
    for key in (b"one", b"two"):
        simulation.scheduler.sequences.change_weights(WeightsVersion(key.decode(), key))
        assert [cached(), cached()] == [0, first]


def test_outputs_say_which_weights_gave_their_tokens() -> None:
    """Those that wait are named anew; those that run are preempted first, and keep their tokens."""
    simulation = Simulation(depth=1, max_num_seqs=1)
    (running,) = simulation.submit(LONG[:10], max_tokens=6)
    (waiting,) = simulation.submit(LONG[:10], max_tokens=6)
    for _ in range(3):
        simulation.step()
    assert (running.num_output_tokens, waiting.num_output_tokens) == (3, 0)
    names = list(running.block_names)
    assert simulation.scheduler.preempt_all()
    simulation.scheduler.sequences.change_weights(WeightsVersion("2", b"two"))
    simulation.drain()
    assert (running.versions, waiting.versions) == ([(3, "2")], [(0, "2")])
    assert names and not set(names) & set(running.block_names)
    assert running.num_versions_told == waiting.num_versions_told == 1
    (later,) = simulation.submit(LONG[:10], max_tokens=1)
    simulation.drain()
    assert later.versions == [(0, "2")] and later.num_cached_tokens
