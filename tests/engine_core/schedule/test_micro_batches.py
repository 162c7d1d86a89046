"""The scheduler of a pipeline of several stages: all of them have work, and a sequence waits for its own token."""

from __future__ import annotations

import pytest

from tests.engine_core.schedule.simulation import Simulation


def pipeline(stages: int, **config: int) -> Simulation:
    sizes = {"num_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return Simulation(**{**sizes, "depth": stages, "stages": stages, **config})


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("num_sequences", [1, 2, 5, 12, 13])
def test_rows_are_shared_out_among_the_steps_in_flight(stages: int, num_sequences: int) -> None:
    simulation = pipeline(stages)
    for number in range(num_sequences):
        simulation.submit([2, 3, number % 10], max_tokens=28, ignore_eos=True)
    for _ in range(2 * stages):
        simulation.step()
    for _ in range(20):
        while len(simulation.scheduler.in_flight) < stages and simulation.plan() is not None:
            pass
        sizes = [len(step.rows) for step in simulation.scheduler.in_flight]
        assert len(sizes) == min(stages, num_sequences)
        assert sum(sizes) == num_sequences and max(sizes) - min(sizes) <= 1
        simulation.commit()
    simulation.drain()


def test_uneven_steps_become_even() -> None:
    simulation = pipeline(2)
    for _ in range(12):
        simulation.submit([2, 3], max_tokens=28, ignore_eos=True)
    assert len((simulation.plan() or simulation.plans[0]).rows) == 12  # all prompts in one step
    simulation.commit()
    simulation.step()
    assert [len(step.rows) for step in simulation.scheduler.in_flight] == [6]
    simulation.plan()
    assert [len(step.rows) for step in simulation.scheduler.in_flight] == [6, 6]
    simulation.drain()


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    simulation = pipeline(3, max_num_batched_tokens=4)
    (sequence,) = simulation.submit(list(range(2, 12)), max_tokens=5)
    starts = []
    for _ in range(3):
        plan = simulation.plan()
        assert plan is not None
        starts += [(row.start, row.num_samples) for row in plan.rows]
    assert starts == [(0, 0), (4, 0), (8, 1)]
    simulation.commit()
    simulation.commit()
    assert simulation.plan() is None and sequence.num_pending == 1  # its next token is on the way
    simulation.commit()
    plan = simulation.plan()
    assert plan is not None and plan.rows[0].token_ids == simulation.output(sequence)
    simulation.drain()


def test_a_sequence_that_comes_back_brings_all_its_tokens() -> None:
    simulation = pipeline(2)
    (sequence,) = simulation.submit([2, 3], max_tokens=9, ignore_eos=True)
    for _ in range(4):
        simulation.step()
    while simulation.results:
        simulation.commit()
    assert simulation.preempt_all()
    plan = simulation.plan()
    assert plan is not None and not plan.rows[0].token_ids
    assert plan.inits[0].token_ids == [2, 3, *simulation.output(sequence)]
    simulation.drain()


def test_the_others_run_when_a_whole_micro_batch_is_preempted() -> None:
    """All blocks are taken, and the first micro-batch is the sequence that must give its own back."""
    simulation = pipeline(2, num_blocks=32, block_size=1)
    simulation.submit([2], max_tokens=20, ignore_eos=True, tenant="served")
    simulation.drain()
    simulation.submit(list(range(16)), max_tokens=4, ignore_eos=True, tenant="served")
    simulation.submit(list(range(16, 32)), max_tokens=4, ignore_eos=True, tenant="other")
    simulation.plan()
    simulation.commit()
    assert simulation.plan() is not None and simulation.scheduler.stats.num_preemptions == 1
    simulation.drain()
