"""State slots: which ones rows read and write, where checkpoints are, and that mistakes with them are noticed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.states.held_states import StateCheckpoint
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.ipc.wire.steps import Row
from tests.engine_core.schedule.simulation import Forced, Simulation, drafting, expected
from tests.engine_core.schedule.test_scheduler_model import DOCUMENTS

PROMPT = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 2]


class Proposals(Forced):
    """Drafts of two tokens: right ones, but for the last of the first `num_wrong`."""

    def __init__(self, num_wrong: int) -> None:
        super().__init__()
        self.num_wrong = num_wrong

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        right = expected(sequence)[0][sequence.num_output_tokens :][: min(2, limit)]
        self.num_wrong -= 1
        return [*right[:-1], right[-1] ^ 1] if self.num_wrong >= 0 else right


def hybrid(**config: object) -> Simulation:
    """A scheduler with 8 state slots and blocks of 4 tokens, one step at a time."""
    return Simulation(**{"num_states": 8, "checkpoint_tokens": 100, "depth": 1, **config})  # type: ignore[arg-type]


def rows(simulation: Simulation) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Start, slot read and slots written of every row until nothing is left."""
    found = []
    while simulation.live():
        if (plan := simulation.step()) is not None:
            found += [(row.start, row.state, row.states) for row in plan.rows]
    return found


def test_a_row_writes_the_slot_that_it_reads_but_for_a_checkpoint() -> None:
    """The checkpoint of the prompt is at 8 of 11 tokens; the one at 12, while it decodes, gets another slot."""
    simulation = hybrid()
    simulation.submit(PROMPT, max_tokens=4)
    assert rows(simulation) == [
        (0, -1, [(8, 1), (11, 0)]),
        (11, 0, [(12, 2)]),
        (12, 2, [(13, 0)]),
        (13, 0, [(14, 0)]),
    ]


def test_a_hit_reads_the_checkpoint_and_leaves_it_there() -> None:
    simulation = hybrid()
    (first,) = simulation.submit(PROMPT, max_tokens=4)
    simulation.drain()
    (again,) = simulation.submit(PROMPT, max_tokens=1)
    assert rows(simulation) == [(8, 1, [(11, 0)])]
    (turn,) = simulation.submit([*first.token_ids, 3], max_tokens=1)
    assert rows(simulation) == [(12, 2, [(16, 3)])]
    assert (again.num_cached_tokens, turn.num_cached_tokens) == (8, 12)


def test_a_prefix_is_cached_only_as_far_as_states_are() -> None:
    """Blocks of 12 tokens are there, and states behind them, of which this prompt may have 8."""
    simulation = hybrid()
    simulation.submit([*PROMPT, 3, 4], max_tokens=1)
    simulation.drain()
    (other,) = simulation.submit(PROMPT, max_tokens=1)
    simulation.drain()
    assert other.num_cached_tokens == 0
    (longer,) = simulation.submit([*PROMPT, 3, 9], max_tokens=1)
    simulation.drain()
    assert longer.num_cached_tokens == 12


def test_long_prompts_have_checkpoints_every_so_many_tokens() -> None:
    simulation = hybrid(checkpoint_tokens=6)  # of whole blocks: 8
    simulation.submit(list(range(2, 12)) * 2, max_tokens=1)
    assert rows(simulation) == [(0, -1, [(8, 1), (16, 2), (20, 3)])]


def test_the_last_boundary_of_an_output_replaces_the_one_before() -> None:
    simulation = hybrid()
    (sequence,) = simulation.submit(PROMPT[:5], max_tokens=10)
    simulation.drain()
    (group,) = simulation.scheduler.kv.groups
    assert {name: i for i, name in enumerate(sequence.block_names) if name in group.pool.named} == {
        sequence.block_names[i]: i for i in (0, 2)
    }


def test_a_prefix_that_two_prompts_share_is_cached_for_the_third() -> None:
    """The second has a checkpoint where it leaves the first, whose own is behind that."""
    simulation = hybrid()
    cached = []
    for tail in range(3):
        (sequence,) = simulation.submit([*PROMPT[:8], *[tail] * 7], max_tokens=1)
        simulation.drain()
        cached.append(sequence.num_cached_tokens)
    assert cached == [0, 0, 8]


def test_checkpoints_of_a_plan_are_for_the_next_one() -> None:
    """The others of n equal sequences wait for it. What would save less than half of the work is computed again."""
    simulation = hybrid(num_states=16)
    simulation.submit(PROMPT, n=3, max_tokens=1)
    plans = [simulation.step(), simulation.step()]
    assert [[row.start for row in plan.rows] for plan in plans if plan is not None] == [[0], [8, 8]]
    simulation.submit([3, *PROMPT], max_tokens=1)
    simulation.submit([3, *PROMPT, *[4] * 16], max_tokens=1)
    assert [row[0] for row in rows(simulation)] == [0, 0]


@pytest.mark.parametrize("num_wrong", [0, 1, 2])
def test_states_behind_wrong_drafts_are_left_and_the_right_ones_run_again(num_wrong: int) -> None:
    """Rows of one token and two drafts; of the wrong ones the token and the first draft run again."""
    simulation = hybrid(block_size=16, drafter=Proposals(num_wrong))
    simulation.submit([2, 3], max_tokens=9)
    assert (
        rows(simulation)
        == {
            0: [(0, -1, [(2, 0)]), (2, 0, [(5, 1)]), (5, 1, [(8, 0)]), (8, 0, [(10, 1)])],
            1: [(0, -1, [(2, 0)]), (2, 0, [(5, 1)]), (2, 0, [(7, 1)]), (7, 1, [(10, 0)])],
            2: [(0, -1, [(2, 0)]), (2, 0, [(5, 1)]), (2, 0, [(7, 1)]), (2, 0, [(9, 1)]), (9, 1, [(10, 0)])],
        }[num_wrong]
    )


def test_a_preempted_sequence_goes_on_from_its_last_checkpoint() -> None:
    simulation = hybrid()
    simulation.submit(PROMPT, max_tokens=6)
    for _ in range(3):
        simulation.step()
    assert simulation.preempt_all()
    assert rows(simulation)[0][:2] == (12, 2)


def test_when_the_worker_is_lost_its_states_are() -> None:
    simulation = hybrid()
    simulation.submit(PROMPT, max_tokens=6)
    for _ in range(3):
        simulation.step()
    simulation.fail()
    assert rows(simulation)[0][:2] == (0, -1)


def test_without_a_second_slot_there_are_no_drafts() -> None:
    simulation = hybrid(num_states=2, block_size=16, drafter=Proposals(0))
    simulation.submit([2], max_tokens=9)
    simulation.step()
    simulation.scheduler.kv.groups[0].pool.allocate(1)
    plan = simulation.scheduler.plan(simulation.now)
    assert plan is not None and not plan.rows[0].drafts


def test_a_sequence_waits_for_its_slot_and_half_are_left_for_checkpoints() -> None:
    simulation = hybrid(num_states=5)
    first, _, third = (simulation.submit([i], max_tokens=2)[0] for i in (2, 3, 4))
    simulation.step()
    assert len(simulation.scheduler.running) == 2 and third.slot == -1
    simulation.abort([first])
    simulation.step()
    assert third.slot >= 0


def test_one_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="1 state slot does not hold one request, which needs 2"):
        StateSlots(1, 4)


# ---------------------------------------------------------------- lives with faults


def live(seed: int) -> None:
    """A random life of a scheduler with state slots, in which prompts share beginnings."""
    random = Random(seed)
    block_size = random.choice([1, 2, 4])
    simulation = Simulation(
        block_size=block_size,
        num_blocks=random.choice([40, 80]) // block_size,
        num_states=random.choice([3, 6, 12]),
        checkpoint_tokens=random.randint(1, 9),
        depth=random.choice([1, 2]),
        max_num_batched_tokens=random.choice([5, 24]),
        drafter=drafting("random", seed, 3) if seed % 2 else None,
    )
    for _ in range(40):
        event = random.random()
        if event < 0.35:
            prompt = random.choice(DOCUMENTS)[: random.randint(1, 14)]
            simulation.submit(prompt, max_tokens=random.randint(1, 9), n=random.choice([1, 1, 2]))
        elif event < 0.38:
            simulation.fail()
        elif event < 0.43:
            simulation.preempt_all()
        else:
            simulation.step()
    simulation.drain()


def test_random_lives_are_right() -> None:
    for seed in range(40):
        live(seed)


def names_within_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = StateSlots.fill

    def early(self: StateSlots, sequence: Sequence, row: Row) -> None:
        fill(self, sequence, row)
        self.register(sequence)

    monkeypatch.setattr(StateSlots, "fill", early)


def gives_back_within_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = StateSlots.fill

    def early(self: StateSlots, sequence: Sequence, row: Row) -> None:
        fill(self, sequence, row)
        self.pool.free(self._read)
        self._read.clear()

    monkeypatch.setattr(StateSlots, "fill", early)


def names_one_block_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    register = StateSlots.register

    def shifted(self: StateSlots, sequence: Sequence) -> None:
        held, size = self.held[sequence], self._block_size
        moved = [StateCheckpoint(each.end + size, each.slot, each.rolling) for each in held.unnamed]
        held.unnamed, kept = moved, held.unnamed
        register(self, sequence)
        held.unnamed = kept[len(kept) - len(held.unnamed) :]

    monkeypatch.setattr(StateSlots, "register", shifted)


def goes_back_to_the_accepted_token(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = StateSlots.verify

    def too_little(self: StateSlots, sequence: Sequence, row: Row, num_rejected: int) -> int:
        verify(self, sequence, row, num_rejected)
        return row.start + row.num_tokens - num_rejected

    monkeypatch.setattr(StateSlots, "verify", too_little)


def goes_on_from_wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = StateSlots.verify

    def believing(self: StateSlots, sequence: Sequence, row: Row, num_rejected: int) -> int:
        verify(self, sequence, row, 0)
        return row.start if num_rejected else row.start + row.num_tokens

    monkeypatch.setattr(StateSlots, "verify", believing)


def keeps_checkpoints_of_wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = StateSlots.verify

    def keeping(self: StateSlots, sequence: Sequence, row: Row, num_rejected: int) -> int:
        held, kept = self.held[sequence], list(self.held[sequence].unnamed)
        self.pool.share(checkpoint.slot for checkpoint in kept)
        computed = verify(self, sequence, row, num_rejected)
        self.pool.free(checkpoint.slot for checkpoint in held.unnamed)
        held.unnamed = kept
        return computed

    monkeypatch.setattr(StateSlots, "verify", keeping)


def writes_over_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = StateSlots.admit

    def greedy(self: StateSlots, sequence: Sequence, end: int) -> None:
        admit(self, sequence, end)
        held = self.held[sequence]
        if held.latest is not None:
            self.pool.free([held.own])
            held.own = held.latest

    monkeypatch.setattr(StateSlots, "admit", greedy)


def hits_without_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSlots, "reach", lambda self, sequence, end: end)


def keeps_names_when_the_worker_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "lose", lambda self: self.pool.forget())


@pytest.mark.parametrize(
    "plant",
    [
        names_within_the_plan,
        gives_back_within_the_plan,
        names_one_block_too_far,
        goes_back_to_the_accepted_token,
        goes_on_from_wrong_drafts,
        keeps_checkpoints_of_wrong_drafts,
        writes_over_a_checkpoint,
        hits_without_states,
        keeps_names_when_the_worker_is_lost,
    ],
)
def test_every_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each within the lives that are right without it."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"reads|writes"):
        for seed in range(40):
            live(seed)
