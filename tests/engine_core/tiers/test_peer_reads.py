"""Prefixes that other cores have: who is asked for them, what is fetched, and what becomes of the rest."""

from __future__ import annotations

import pytest

from pagewire.engine_core.schedule.sequence import State
from pagewire.engine_core.tiers import reads as module
from pagewire.engine_core.tiers.costs import MIN_BLOCKS, ReadCosts
from pagewire.engine_core.tiers.peer_names import MAX_KNOWN, PeerNames
from tests.engine_core.tiers.simulated import TieredSimulation
from tests.engine_core.tiers.test_reads import A, B, evicted, run, small


def moved(**config: object) -> TieredSimulation:
    """A, B and C were computed in another core, and nothing of A is here."""
    simulation = small(num_peers=1, **config)
    evicted(simulation)
    run(simulation, [5, *B[1:]])
    simulation.forget_tier()
    simulation.reads.peers.forget()
    return simulation


def test_a_prefix_comes_from_another_core() -> None:
    simulation = moved()
    (sequence,) = simulation.submit(A)
    simulation.plan()
    assert sequence.state is State.WAITING and len(simulation.questions) == 1
    simulation.answer()
    simulation.plan()
    assert sequence.state is State.WAITING and len(simulation.parts) == 1 and not simulation.pending
    simulation.finish_fetch()
    simulation.drain()
    assert sequence.num_cached_tokens == 16
    assert simulation.reads.num_peer_hits >= 4 and simulation.reads.num_hits == 0


def test_others_run_while_cores_are_asked() -> None:
    simulation = moved(max_num_seqs=3)
    (slow,) = simulation.submit(A)
    (other,) = simulation.submit([5, 6, 7])
    while other.state is not State.FINISHED:
        assert simulation.plan() is not None
        simulation.commit()
        assert slow.state is State.WAITING and simulation.questions
    simulation.drain()
    assert slow.num_cached_tokens == 16


def test_sequences_with_the_same_prefix_ask_once() -> None:
    simulation = moved(max_num_seqs=3, num_blocks=12)
    group = simulation.submit(A, n=2)
    simulation.plan()
    assert len(simulation.questions) == 1
    simulation.answer()
    simulation.plan()
    assert len(simulation.parts) == 1 and not simulation.questions
    simulation.drain()
    assert [sequence.num_cached_tokens for sequence in group] == [16, 16]


def test_what_nobody_has_is_asked_for_once() -> None:
    simulation = moved()
    simulation.elsewhere.clear()
    (sequence,) = simulation.submit(A)
    simulation.plan()
    simulation.answer()
    assert simulation.plan() is not None and not simulation.questions
    names, key = simulation.reads.peers, sequence.block_names[3]
    assert names.is_known(key)
    names.forget_asked()
    assert not names.is_known(key)
    names.reachable = ()
    assert names.is_known(key), "there is nobody to ask"
    simulation.drain()


def test_a_core_that_does_not_answer_is_not_waited_for() -> None:
    simulation = moved()
    (sequence,) = simulation.submit(A)
    simulation.plan()
    simulation.leave_unanswered()
    assert simulation.plan() is not None and sequence.state is State.RUNNING
    simulation.drain()
    assert sequence.num_cached_tokens == 0


def test_a_late_answer_is_no_answer() -> None:
    simulation = moved()
    simulation.submit(A)
    simulation.plan()
    (question,) = simulation.questions
    simulation.leave_unanswered()
    assert simulation.reads.peers.answered(question.number, 0, 0, b"\1" * len(question.names)) == []
    simulation.drain()


def test_what_does_not_come_is_computed_and_not_believed_again() -> None:
    simulation = moved()
    (sequence,) = simulation.submit(A)
    simulation.plan()
    simulation.answer()
    simulation.plan()
    names = [block.name for block in simulation.parts[0].blocks]
    simulation.finish_fetch(fails=0b10)  # its second block
    simulation.drain()
    assert sequence.num_cached_tokens == 4
    places = simulation.reads.peers.places
    assert names[1] not in places and names[0] in places


def test_a_core_that_says_it_has_what_it_has_not_costs_a_fetch() -> None:
    simulation = moved()
    simulation.elsewhere.clear()
    (sequence,) = simulation.submit(A)
    simulation.plan()
    simulation.answer(lies=0b1111)
    simulation.drain()
    assert sequence.num_cached_tokens == 0 and not simulation.reads.peers.places


def test_a_read_from_disk_and_from_another_core_ends_with_its_last_part() -> None:
    simulation = moved()
    names = list(simulation.elsewhere)
    (sequence,) = simulation.submit(A)
    simulation.plan()
    first = sequence.block_names[0]
    assert first in names
    simulation.reads.names.add(first)
    simulation.tier[first] = simulation.elsewhere[first]
    simulation.answer()
    simulation.plan()
    assert [block.name for block in simulation.pending[0].back] == [first]
    assert first not in {block.name for block in simulation.parts[0].blocks}
    simulation.finish_fetch()
    assert simulation.plan() is None and sequence.state is State.WAITING
    simulation.finish_read()
    simulation.drain()
    assert sequence.num_cached_tokens == 16
    assert simulation.reads.num_hits == 1 and simulation.reads.num_peer_hits >= 3


def test_a_long_prefix_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 2)
    simulation = moved()
    (sequence,) = simulation.submit(A)
    simulation.plan()
    simulation.answer()
    simulation.plan()
    assert [len(part.blocks) for part in simulation.parts] == [2, 2]
    simulation.finish_fetch()
    simulation.finish_fetch(fails=1)  # the third block
    simulation.drain()
    assert sequence.num_cached_tokens == 8


def test_lost_workers_lose_questions_and_parts() -> None:
    simulation = moved(max_num_seqs=3, num_blocks=20)
    first, second = simulation.submit(A)[0], simulation.submit([7, *B])[0]
    simulation.plan()
    simulation.answer()
    simulation.plan()
    simulation.fail()
    assert simulation.reads.num_reads == 0
    simulation.drain()
    assert first.state is second.state is State.FINISHED


def test_states_come_with_their_prefix() -> None:
    simulation = moved(num_states=4, checkpoint_tokens=8)
    assert run(simulation, A).num_cached_tokens == 16


def test_short_prefixes_are_not_asked_for() -> None:
    simulation = moved(costs=ReadCosts(block_size=4))
    simulation.submit(A[: 4 * MIN_BLOCKS])
    simulation.plan()
    assert not simulation.questions
    simulation.drain()


def test_nothing_is_fetched_that_computing_gives_sooner() -> None:
    costs = ReadCosts(block_size=16, block_bytes=10)
    costs.measure_step(num_tokens=160, num_prompt_tokens=160, seconds=1.0)
    assert costs.reads(10, 10, num_fetched=10)  # the cost of fetching is not known yet
    costs.measure_fetch(num_bytes=100, seconds=1.1)
    costs.measure_read(num_bytes=100, seconds=0.1)
    assert not costs.reads(10, 10, num_fetched=10)
    assert costs.reads(10, 10) and costs.reads(10, 10, num_fetched=5), "from disk it is cheaper"
    assert costs.compute(10) == pytest.approx(1.0)


def test_what_is_known_of_others_is_bounded() -> None:
    names = PeerNames()
    sequence = run(small(), A)
    for first in range(0, MAX_KNOWN + 4096, 1024):
        key = first.to_bytes(32, "big")
        names.ask(key, [number.to_bytes(32, "little") for number in range(first, first + 1024)], sequence)
        (question,) = names.take_questions()
        question.open = {(0, 0)}
        assert names.answered(question.number, 0, 0, b"\1" * 5000) == [sequence]
    assert len(names.places) == MAX_KNOWN
