"""Prefixes that are read from a cold tier: what they hold, whom they hold up, and what becomes of them."""

from __future__ import annotations

from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.tiers.costs import MIN_BLOCKS, RETRY, ReadCosts
from pagewire.ipc.wire.block_names import ROOT
from pagewire.ipc.wire.tier_messages import state_name
from tests.engine_core.tiers.simulated import TieredSimulation

A, B, C = (
    [first, *range(2, 12), *range(2, 10)] for first in (2, 3, 4)
)  # 19 tokens: 4 blocks, and a part of one


def small(**config: object) -> TieredSimulation:
    """Eight blocks: room for one prompt and its output, or a little more."""
    return TieredSimulation(**{"num_blocks": 8, **config})  # type: ignore[arg-type]


def run(simulation: TieredSimulation, prompt: list[int], **more: object) -> Sequence:
    (sequence,) = simulation.submit(prompt, **more)  # type: ignore[arg-type]
    simulation.drain()
    return sequence


def evicted(simulation: TieredSimulation) -> None:
    """A, B and C one after the other: what is left of A is on disk."""
    for prompt in (A, B, C):
        assert run(simulation, prompt).num_cached_tokens == 0


def test_an_evicted_prefix_comes_back() -> None:
    simulation = small()
    evicted(simulation)
    assert run(simulation, A).num_cached_tokens == 16
    assert simulation.reads.num_hits >= 4


def test_blocks_are_kept_with_their_parents() -> None:
    simulation = small()
    evicted(simulation)
    names = run(simulation, A).block_names
    assert [simulation.parents[name] for name in names[:4]] == [ROOT, *names[:3]]


def test_others_run_while_a_prefix_is_read() -> None:
    simulation = small(max_num_seqs=3)
    evicted(simulation)
    (slow,) = simulation.submit(A)
    (other,) = simulation.submit([5, 6, 7])
    while other.state is not State.FINISHED:
        assert simulation.plan() is not None
        simulation.commit()
        assert slow.state is State.WAITING and simulation.pending
    assert simulation.scheduler.num_unfinished == simulation.scheduler.sequences.num_waiting == 1
    simulation.finish_read()
    simulation.drain()
    assert slow.num_cached_tokens == 16


def test_sequences_with_the_same_prefix_wait_for_one_read() -> None:
    simulation = small(max_num_seqs=3, num_blocks=12)
    for prompt in (A, B, C, [5, *B[1:]]):
        run(simulation, prompt)
    group = simulation.submit(A, n=2)
    simulation.plan()
    assert len(simulation.pending) == 1 and simulation.reads.num_reads == 1
    simulation.drain()
    assert [sequence.num_cached_tokens for sequence in group] == [16, 16]


def test_what_cannot_be_read_is_computed() -> None:
    simulation = small()
    evicted(simulation)
    (sequence,) = simulation.submit(A)
    simulation.plan()
    names = {block.name for block in simulation.pending[0].back}
    assert len(names) >= 3
    simulation.finish_read(fails=0b10)  # its second block
    simulation.drain()
    assert sequence.num_cached_tokens == 4
    assert len(names & simulation.reads.names) == len(names) - 1


def test_a_sequence_that_ends_meanwhile_leaves_its_prefix_cached() -> None:
    simulation = small()
    evicted(simulation)
    group = simulation.submit(A)
    simulation.plan()
    simulation.abort(group)
    assert simulation.scheduler.num_unfinished == 0 and simulation.reads.num_reads == 1
    simulation.finish_read()
    assert run(simulation, A).num_cached_tokens == 16


def test_nothing_is_found_after_a_reset() -> None:
    """Not even what is being read: it may be of memory that is no more."""
    simulation = small()
    evicted(simulation)
    group = simulation.submit(A)
    simulation.plan()
    assert simulation.reset_prefix_cache()
    simulation.finish_read()
    assert not simulation.scheduler.kv.pool.named
    simulation.drain()
    assert group[0].num_cached_tokens == 0


def test_lost_workers_lose_reads_but_not_the_tier() -> None:
    simulation = small()
    evicted(simulation)
    (sequence,) = simulation.submit(A)
    simulation.plan()
    simulation.fail()
    assert not simulation.reads.num_reads and sequence.state is State.WAITING
    simulation.drain()
    assert sequence.num_cached_tokens == 16


def test_a_read_that_takes_too_long_is_not_waited_for() -> None:
    simulation = small(num_blocks=12)
    for prompt in (A, B, C, [5, *B[1:]]):
        run(simulation, prompt)
    (sequence,) = simulation.submit(A)
    simulation.plan()
    simulation.expire_reads()
    while sequence.state is not State.FINISHED:
        assert simulation.plan() is not None, "it waits"
        simulation.commit()
    assert sequence.num_cached_tokens is not None and sequence.num_cached_tokens < 16
    assert simulation.reads.num_reads == 1
    simulation.drain()


def test_a_late_read_of_a_sequence_that_has_begun_anew_is_dropped() -> None:
    """With more tokens than short rotary angles are for, its blocks have other names and another content."""
    simulation = small(num_blocks=12, short_length=22)
    for prompt in (A, B, C, [5, *B[1:]]):
        run(simulation, prompt, max_tokens=1)
    (sequence,) = simulation.submit(A, max_tokens=6)
    simulation.plan()
    simulation.expire_reads()
    names = list(sequence.block_names)
    while sequence.state is not State.FINISHED:
        assert simulation.plan() is not None, "it waits"
        simulation.commit()
    assert names and sequence.block_names[0] != names[0] and simulation.reads.num_reads == 1
    simulation.finish_read()
    simulation.drain()
    assert simulation.reads.num_hits == 0


def test_nothing_is_read_without_room() -> None:
    simulation = small(max_num_seqs=3)
    evicted(simulation)
    (first,) = simulation.submit([9, *A], max_tokens=9)
    simulation.plan()
    assert first.state is State.RUNNING
    simulation.submit(A)
    simulation.plan()
    assert not simulation.pending
    simulation.drain()


def test_nothing_is_read_that_computing_gives_sooner() -> None:
    costs = ReadCosts(block_size=16, block_bytes=10, state_bytes=40)
    few, enough = MIN_BLOCKS - 1, MIN_BLOCKS
    assert not costs.reads(few, few) and costs.reads(enough, enough)
    costs.measure_step(num_tokens=100, num_prompt_tokens=10, seconds=50.0)  # above all, others
    assert costs.compute_seconds == 0.0
    costs.measure_step(num_tokens=100, num_prompt_tokens=100, seconds=0.1)
    assert costs.reads(enough, enough)  # the cost of reading is not known yet
    costs.measure_read(num_bytes=100, seconds=0.1)
    assert costs.reads(enough, enough)
    assert not costs.reads(enough, enough, state=True), "the states have as many bytes as the blocks"
    assert costs.reads(enough, 2 * enough, state=True), "more need not be computed"
    for _ in range(20):
        costs.measure_read(num_bytes=100, seconds=0.3)
    assert [costs.reads(enough, enough) for _ in range(2 * RETRY)].count(True) == 2


def test_short_prefixes_are_computed() -> None:
    simulation = small(costs=ReadCosts(block_size=4))
    evicted(simulation)
    (sequence,) = simulation.submit(A[:13])
    simulation.drain()
    assert sequence.num_cached_tokens == 0 and not simulation.reads.num_hits


def test_states_are_read_with_their_prefix() -> None:
    simulation = small(num_states=4, checkpoint_tokens=8)
    evicted(simulation)
    again = run(simulation, A)
    assert again.num_cached_tokens == 16 and state_name(again.block_names[3]) in simulation.reads.names


def test_without_its_states_a_prefix_is_computed() -> None:
    simulation = small(num_states=4, checkpoint_tokens=8)
    evicted(simulation)
    (sequence,) = simulation.submit(A)
    simulation.plan()
    message = simulation.pending[0]
    assert [block.is_state for block in message.back].count(True) == 1
    simulation.finish_read(fails=1 << len(message.back) - 1)
    simulation.drain()
    assert sequence.num_cached_tokens is not None and sequence.num_cached_tokens < 16


def test_states_alone_are_read() -> None:
    """The blocks are cached, and the states behind them on disk alone."""
    simulation = small(num_blocks=40, num_states=4, checkpoint_tokens=8)
    for prompt in (A, B, C):
        run(simulation, prompt)
    (sequence,) = simulation.submit(A)
    simulation.plan()
    assert [block.is_state for block in simulation.pending[0].back] == [True]
    simulation.drain()
    assert sequence.num_cached_tokens == 16
