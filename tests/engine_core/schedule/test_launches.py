"""Plans for several steps: when they are made, for how many, and that a newcomer does not wait for them."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from pagewire.engine_core.schedule.launches import LAUNCH_SECONDS
from pagewire.engine_core.schedule.step import PlannedStep
from pagewire.ipc.wire.steps import Row, RowResult, StepResult
from tests.engine_core.schedule.simulation import EOS, Simulation, expected

STEP_US = 100
FITTING = int(LAUNCH_SECONDS * 1e6) // STEP_US


def launching(step_us: int = STEP_US, **config: Any) -> Simulation:
    """A scheduler that plans up to 64 steps at once, with a worker that runs all that it may."""
    simulation = Simulation(max_model_len=256, num_blocks=200, launch_steps=64, **config)
    simulation.worker.step_us = step_us
    return simulation


def launches(simulation: Simulation) -> list[int]:
    """The number of steps of each plan until all sequences have ended."""
    found = []
    while simulation.live():
        if (plan := simulation.step()) is not None:
            found.append(plan.num_steps)
    simulation.drain()
    return found


def test_a_launch_takes_as_long_as_it_may_and_ends_with_the_sequence() -> None:
    simulation = launching(depth=2)
    (sequence,) = simulation.submit([2, 3, 4], max_tokens=100)
    found = launches(simulation)
    assert set(found) == {1, FITTING, 100 - 3 - 2 * FITTING}
    assert simulation.output(sequence) == expected(sequence)[0]


@pytest.mark.parametrize(("step_us", "longest"), [(1_000, 4), (2_100, 1), (100_000, 1), (1, 64)])
def test_slow_steps_are_launched_one_by_one(step_us: int, longest: int) -> None:
    simulation = launching(step_us)
    simulation.submit([2, 3, 4], max_tokens=150)
    assert max(launches(simulation)) == longest


def test_no_launch_while_a_sequence_waits_or_has_a_grammar() -> None:
    simulation = launching(max_num_seqs=1)
    first = simulation.submit([2, 3, 4], max_tokens=20)
    second = simulation.submit([5, 6], max_tokens=100)
    while first[0] in simulation.live():
        plan = simulation.step()
        assert plan is None or plan.num_steps == 1 or second[0] in simulation.scheduler.running
    assert max(launches(simulation)) > 1
    simulation.submit([2, 3], max_tokens=20, structured_outputs={"regex": "[a-z]*"})
    assert set(launches(simulation)) == {1}


def test_a_newcomer_is_planned_while_a_launch_is_in_flight() -> None:
    simulation = launching(depth=2)
    simulation.submit([2, 3, 4], max_tokens=200)
    while (plan := simulation.plan()) is None or plan.num_steps == 1:
        simulation.commit()
    assert simulation.plan() is None  # where the first goes on is not known
    (newcomer,) = simulation.submit([5, 6], max_tokens=5)
    plan = simulation.plan()
    assert plan is not None and [init.token_ids for init in plan.inits] == [[5, 6]]
    assert (len(plan.rows), plan.num_steps) == (1, 1)
    simulation.drain()
    assert simulation.output(newcomer) == expected(newcomer)[0]


def test_a_launch_takes_no_block_that_others_may_need() -> None:
    simulation = Simulation(max_model_len=40, num_blocks=12, block_size=4, launch_steps=64)
    simulation.worker.step_us = STEP_US
    simulation.submit([2, 3, 4], max_tokens=30)
    simulation.submit([2, 3, 5], max_tokens=30)
    found = launches(simulation)
    assert max(found) > 1 and simulation.scheduler.stats.num_cache_preemptions > 0


def test_a_launch_that_ended_early_goes_on_behind_the_last_token() -> None:
    """With an end token that the worker does not know, or with one that it has found."""
    for seed in count():
        simulation = launching()
        (sequence,) = simulation.submit([2, 3, 4], seed=seed, eos=EOS, max_tokens=60)
        if 10 < len(expected(sequence)[0]) < 30:
            break
    assert max(launches(simulation)) > 1
    assert (simulation.output(sequence), simulation.finish_reason(sequence)) == expected(sequence)[:2]


@pytest.mark.parametrize(
    "row", [RowResult(), RowResult([1, 2, 3, 4]), RowResult([1], drafts=[2])], ids=["none", "four", "drafts"]
)
def test_a_result_that_does_not_fit_a_launch(row: RowResult) -> None:
    (sequence,) = Simulation().submit([2, 3, 4])
    step = PlannedStep(7, 100, [sequence], [Row(0, 3, 1, num_samples=1)], num_steps=3)
    step.check(StepResult(7, [RowResult([1, 2, 3])]))
    with pytest.raises(ValueError, match="a row of"):
        step.check(StepResult(7, [row]))


@pytest.mark.parametrize(
    ("rows", "num_run"),
    [
        ([RowResult([1, 2, 3]), RowResult([4])], 3),
        ([RowResult([1]), RowResult([4])], 1),
        ([RowResult([], error="it failed"), RowResult([], error="it failed")], 1),
    ],
)
def test_how_many_steps_a_result_is_of(rows: list[RowResult], num_run: int) -> None:
    """Given by rows or by columns, also where no row has a token."""
    (sequence,) = Simulation().submit([2, 3, 4])
    step = PlannedStep(7, 100, [sequence] * 2, [Row(i, 3, 1, num_samples=1) for i in range(2)], num_steps=3)
    for result in (StepResult(7, rows), StepResult(7, rows).by_columns()):
        assert step.num_run(result) == num_run
