"""Swap space: what preempted sequences leave there, how they come back, and what becomes of its places."""

from __future__ import annotations

import pytest

from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.tiers.costs import MIN_BLOCKS, ReadCosts
from pagewire.engine_core.tiers.swap import SwapSpace
from pagewire.ipc.wire.block_names import ROOT
from pagewire.ipc.wire.tier_messages import BlockBack, BlockOut, state_name
from tests.engine_core.tiers.simulated import TieredSimulation

PLENTY = (60, 30)
PROMPTS = [[first, *range(2, 9)] for first in range(2, 6)]  # two blocks each


class NeverRead(ReadCosts):
    """Computes whatever there is."""

    def reads(self, num_blocks: int, num_saved: int, **more: object) -> bool:  # type: ignore[override]
        return False


def swapping(**config: object) -> TieredSimulation:
    """Swap space alone, and half the blocks that four sequences of 24 tokens need."""
    chosen = {"keeps": False, "swap_size": PLENTY, "num_blocks": 12, "max_num_seqs": 4} | config
    return TieredSimulation(**chosen)  # type: ignore[arg-type]


def run_all(simulation: TieredSimulation) -> list[Sequence]:
    sequences = [sequence for prompt in PROMPTS for sequence in simulation.submit(prompt, max_tokens=16)]
    simulation.drain()
    return sequences


def test_preempted_sequences_come_back_from_swap_space() -> None:
    """Each gets the tokens that it gets alone, which the simulation checks, and fewer are computed again."""
    simulation = swapping()
    run_all(simulation)
    stats, reads = simulation.scheduler.stats, simulation.reads
    assert stats.num_cache_preemptions and reads.num_swap_hits and reads.swap.num_back >= reads.num_swap_hits
    assert reads.num_hits == reads.num_peer_hits == 0 and not reads.names
    without = swapping(swap_size=(0, 0))
    run_all(without)
    assert without.scheduler.stats.num_cache_preemptions and not without.reads.num_swap_hits
    assert stats.num_prompt_tokens < without.scheduler.stats.num_prompt_tokens


def test_the_mode_of_preemption_is_obeyed() -> None:
    """Costs decide about sequences that are new in any mode, and about preempted ones in mode "auto"."""
    for preemption, costs, swaps in (
        ("swap", NeverRead(4), True),
        ("auto", NeverRead(4), False),
        ("recompute", None, False),
    ):
        simulation = swapping(preemption=preemption, costs=costs)
        run_all(simulation)
        assert simulation.scheduler.stats.num_cache_preemptions
        assert bool(simulation.reads.num_swap_hits) is swaps, preemption


def test_evicted_prefixes_of_new_requests_come_back_too() -> None:
    """Also where preempted sequences are computed: the mode is about these alone."""
    simulation = swapping(preemption="recompute", num_blocks=8)
    prompts = [[first, *range(2, 20)] for first in (2, 3, 4)]
    for prompt in (*prompts, prompts[0]):
        (sequence,) = simulation.submit(prompt, max_tokens=2)
        simulation.drain()
    assert sequence.num_cached_tokens == 16
    assert simulation.reads.num_first_hits == simulation.reads.num_swap_hits > 0


def test_states_come_back_with_their_blocks() -> None:
    simulation = swapping(num_states=10, checkpoint_tokens=4)
    run_all(simulation)
    assert simulation.scheduler.stats.num_cache_preemptions and simulation.reads.num_swap_hits
    assert any(place.name is not None for place in simulation.reads.swap._states.blocks)


def test_lost_workers_take_the_swap_space_along() -> None:
    """Its sequences are computed anew, and no token changes."""
    simulation = swapping()
    sequences = [sequence for prompt in PROMPTS for sequence in simulation.submit(prompt, max_tokens=16)]
    while not simulation.pending:
        simulation.plan()
        if simulation.results:
            simulation.commit()
    assert len(simulation.reads.swap)
    simulation.fail()
    assert not len(simulation.reads.swap) and not simulation.reads.num_reads
    simulation.drain()
    assert all(sequence.finished for sequence in sequences)


def test_a_reset_empties_the_swap_space_but_for_what_is_being_read() -> None:
    simulation = swapping(num_blocks=8)
    prompts = [[first, *range(2, 20)] for first in (2, 3, 4)]
    for prompt in prompts:
        simulation.submit(prompt, max_tokens=2)
        simulation.drain()
    (sequence,) = simulation.submit(prompts[0], max_tokens=2)
    simulation.plan()
    assert simulation.pending and simulation.reset_prefix_cache()
    assert not len(simulation.reads.swap)
    simulation.finish_read()
    simulation.drain()
    assert sequence.num_cached_tokens == 0


def test_who_counts_as_swapped() -> None:
    """A preempted sequence does while blocks of it are in the swap space alone; one that is new does not."""
    simulation = swapping(costs=NeverRead(4))
    for prompt in PROMPTS:
        simulation.submit(prompt, max_tokens=16)
    seen = 0
    while simulation.scheduler.num_unfinished:
        kv = simulation.scheduler.kv
        for sequence in simulation.scheduler.waiting:
            away = simulation.reads.is_away(sequence, kv)
            lost = [name for name in sequence.block_names if kv.pool.find(name) is None]
            known = sequence.num_cached_tokens is not None and any(
                name in simulation.reads.swap for name in lost
            )
            assert away is known and sequence.state is State.WAITING
            seen += away
        simulation.step()
    assert seen


# ---------------------------------------------------------------- places


def out(number: int, *, is_state: bool = False) -> BlockOut:
    name = bytes([number]) * 32
    return BlockOut(number, state_name(name) if is_state else name, ROOT, is_state)


def test_the_least_recently_used_give_way() -> None:
    swap = SwapSpace()
    assert swap.take(out(1)) is None, "it has no places"
    swap.open(2, 1)
    copies = [swap.take(out(number)) for number in (1, 2)]
    assert [copy is not None and copy.block_id for copy in copies] == [1, 2]
    assert swap.take(out(1)) is None and swap.usage == 1.0  # it is here, and used again
    third = swap.take(out(3))
    assert third is not None and copies[1] is not None and third.place == copies[1].place
    assert [out(number).name in swap for number in (1, 2, 3)] == [True, False, True]
    assert swap.num_out == 3 and len(swap) == 2


def test_places_that_are_read_are_not_given_away() -> None:
    swap = SwapSpace()
    swap.open(1, 0)
    swap.take(out(1))
    copy, place = swap.pin(BlockBack(7, out(1).name))
    assert (copy.block_id, copy.place) == (7, place.block_id)
    assert swap.take(out(2)) is None and out(2).name not in swap
    swap.forget()
    assert swap.take(out(2)) is None, "it is still read"
    swap.unpin([copy], [place])
    assert swap.take(out(2)) is not None


def test_states_have_places_of_their_own() -> None:
    swap = SwapSpace()
    swap.open(1, 1)
    block, state = swap.take(out(1)), swap.take(out(1, is_state=True))
    assert block is not None and state is not None and (block.is_state, state.is_state) == (False, True)
    assert len(swap) == 2 and swap.take(out(2, is_state=True)) is not None
    assert out(1).name in swap and out(1, is_state=True).name not in swap


def test_copying_is_weighed_against_computing() -> None:
    costs, enough = ReadCosts(block_size=16, block_bytes=10), MIN_BLOCKS
    costs.measure_step(num_tokens=100, num_prompt_tokens=100, seconds=0.1)  # 16 ms a block
    costs.measure_read(num_bytes=100, seconds=1.0)  # 100 ms a block
    assert costs.reads(enough, enough, num_swapped=enough), "nothing is known of swap space"
    costs.measure_swap(num_bytes=100, seconds=0.01)  # 1 ms a block
    assert costs.reads(enough, enough, num_swapped=enough)
    assert not costs.reads(enough, enough), "from disk"
    assert not costs.reads(enough, enough, num_swapped=1), "but for one from disk"
    for _ in range(30):
        costs.measure_swap(num_bytes=100, seconds=1.0)
    assert not costs.reads(enough, enough, num_swapped=enough)


@pytest.mark.parametrize("swap_size", [(1, 1), (3, 2)])
def test_little_swap_space_is_better_than_none(swap_size: tuple[int, int]) -> None:
    """Prefixes whose first blocks gave way are computed; whatever happens, no token changes."""
    simulation = swapping(swap_size=swap_size)
    run_all(simulation)
    assert simulation.scheduler.stats.num_cache_preemptions and simulation.reads.swap.num_out
