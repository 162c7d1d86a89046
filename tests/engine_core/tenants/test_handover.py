"""Tenants share the engine: the least served is next, a batch does not hold up who comes later, nobody starves."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.tenants.accounts import PASSES, Accounts
from pagewire.engine_core.tenants.handover import PATIENCE_SECONDS
from pagewire.ipc.shares import MAX_IDLE
from tests.engine_core.schedule.simulation import Simulation

LONG, SHORT = 20, 2


def admission_order(
    simulation: Simulation, sequences: Collection[Sequence], limit: int = 2000
) -> list[Sequence]:
    """The sequences in the order in which they get a slot for the first time."""
    seen: dict[Sequence, None] = {}
    for _ in range(limit):
        simulation.step()
        seen.update(dict.fromkeys(sequence for sequence in sequences if sequence.scheduled_time))
        if len(seen) == len(sequences):
            return list(seen)
    raise AssertionError(f"{len(sequences) - len(seen)} sequences never ran")


def start_flood(simulation: Simulation, number: int, **more: object) -> list[Sequence]:
    """One tenant's sequences, which take all slots and a long time."""
    flood = [simulation.submit([5, 6, i % 8 + 2], max_tokens=LONG, **more)[0] for i in range(number)]  # type: ignore[arg-type]
    for _ in range(3):
        simulation.step()
    return flood


def test_a_tenant_does_not_wait_behind_the_queue_of_another() -> None:
    simulation = Simulation(max_num_seqs=4, num_blocks=64)
    flood = start_flood(simulation, 100, tenant="greedy")
    (small,) = simulation.submit([7], tenant="modest", max_tokens=SHORT)
    order = admission_order(simulation, [*flood, small])
    assert order.index(small) == 4
    simulation.drain()


def test_without_names_the_order_is_that_of_arrival() -> None:
    simulation = Simulation(max_num_seqs=4, num_blocks=64)
    flood = start_flood(simulation, 30)
    more = [simulation.submit([7], max_tokens=SHORT, n=n) for n in (1, 3, 1)]
    group = [*flood, *(sequence for sequences in more for sequence in sequences)]
    assert admission_order(simulation, group) == group
    assert simulation.scheduler.stats.num_preemptions == 0


def test_the_end_of_a_batch_lets_later_requests_pass() -> None:
    """The prompts of one request queue as if others came between them; a later one is not behind all of them."""
    simulation = Simulation(max_num_seqs=2, num_blocks=64)
    batch = [simulation.submit([5, 6, rank % 8 + 2], max_tokens=SHORT, rank=rank)[0] for rank in range(300)]
    for _ in range(3):
        simulation.step()
    num_before = sum(sequence.scheduled_time > 0 for sequence in batch)
    (small,) = simulation.submit([7], max_tokens=SHORT)
    order = admission_order(simulation, [*batch, small])
    assert order.index(small) <= num_before + 1
    assert order[: order.index(small)] == batch[: order.index(small)]


def test_a_batch_is_passed_by_a_bounded_number() -> None:
    """While others come without end, each sequence of a batch is passed by `PASSES` for each one before it."""
    simulation = Simulation(max_num_seqs=1, num_blocks=64)
    batch = [simulation.submit([5], max_tokens=1, rank=rank)[0] for rank in range(4)]
    others = [simulation.submit([6], max_tokens=1)[0] for _ in range(3)]
    for _ in range(4 * PASSES):
        others += simulation.submit([6], max_tokens=1)
        simulation.step()
    assert all(sequence.scheduled_time for sequence in batch)
    passing = [other for other in others if 0 < other.scheduled_time < batch[-1].scheduled_time]
    assert 2 * PASSES < len(passing) < 3 * PASSES + 8


@pytest.mark.parametrize("lengths", [(LONG, 1), (LONG, LONG), (3, 9)])
def test_two_that_always_wait_are_served_alike(lengths: tuple[int, int]) -> None:
    """However long their prompts and outputs: by tokens, within what fits the slots (the bound of the paper)."""
    simulation = Simulation(max_num_seqs=3, num_blocks=64)
    tenants = {"long": lengths[0], "short": lengths[1]}
    waiting: dict[str, list[Sequence]] = {name: [] for name in tenants}
    for _ in range(400):
        for name, length in tenants.items():
            waiting[name] = [s for s in waiting[name] if s.state is State.WAITING]
            while len(waiting[name]) < 4:
                waiting[name] += simulation.submit([5] * (1 + length // 2), tenant=name, max_tokens=length)
        simulation.step()
        served = [tenant.served for tenant in simulation.scheduler.waiting.tenants]
        assert abs(served[0] - served[1]) <= 2 * 3 * (max(lengths) + 1 + max(lengths) // 2)
    by_name = {tenant.name: tenant for tenant in simulation.scheduler.waiting.tenants}
    assert min(tenant.num_output_tokens for tenant in by_name.values()) > 100


def test_idle_time_is_not_saved_up() -> None:
    """A tenant that begins to wait late is served alike from then on, and not alone until it has caught up."""
    simulation = Simulation(max_num_seqs=2, num_blocks=64)
    start_flood(simulation, 60, tenant="early")
    for _ in range(120):
        simulation.step()
    late = [simulation.submit([7], tenant="late", max_tokens=LONG)[0] for _ in range(20)]
    before = {tenant.name: tenant.num_output_tokens for tenant in simulation.scheduler.waiting.tenants}
    assert before["early"] > 150
    while sum(sequence.finished for sequence in late) < 10:
        simulation.step()
    gained = {t.name: t.num_output_tokens - before[t.name] for t in simulation.scheduler.waiting.tenants}
    assert gained["early"] >= 0.7 * gained["late"] > 0


def test_blocks_are_taken_from_the_most_served() -> None:
    """Whoever came last is not preempted if another tenant has been given more."""
    simulation = Simulation(max_num_seqs=4, num_blocks=10, block_size=4, watermark=0.0)
    greedy = [simulation.submit([5, i + 2], tenant="greedy", max_tokens=28)[0] for i in range(2)]
    for _ in range(12):
        simulation.step()
    (modest,) = simulation.submit([7, 8, 9], tenant="modest", max_tokens=24)
    while not simulation.scheduler.stats.num_preemptions:
        simulation.step()
    assert modest.state is State.RUNNING and State.WAITING in {sequence.state for sequence in greedy}
    simulation.drain()


def test_a_tenant_without_a_slot_gets_one_of_a_tenant_with_several() -> None:
    simulation = Simulation(max_num_seqs=3, num_blocks=64)
    flood = start_flood(simulation, 9, tenant="greedy")
    (small,) = simulation.submit([7], tenant="modest", max_tokens=SHORT)
    for _ in range(4):
        simulation.step()
    assert small.state is not State.WAITING and not any(sequence.finished for sequence in flood)
    assert simulation.scheduler.stats.num_preemptions == 1
    simulation.drain()


def test_a_tenant_without_a_slot_does_not_wait_behind_one_that_has_got_its_own() -> None:
    """A tenant that was served less is before it in the queue, with all that it waits for beyond its own slot."""
    simulation = Simulation(max_num_seqs=4, num_blocks=256, max_model_len=200)

    def served(tenant: str) -> int:
        return simulation.scheduler.waiting.tenants.get(tenant).served

    def submit(tenant: str, number: int, max_tokens: int) -> list[Sequence]:
        return [simulation.submit([5, i + 2], tenant=tenant, max_tokens=max_tokens)[0] for i in range(number)]

    submit("modest", 1, 60)
    simulation.drain()
    greedy = submit("greedy", 9, 150)
    while served("greedy") < 30:
        simulation.step()
    late = submit("late", 9, 150)
    while late[0].state is State.WAITING:
        simulation.step()
    (small,) = submit("modest", 1, SHORT)
    while served("greedy") <= served("modest"):
        simulation.step()
    for _ in range(3):
        simulation.step()
    assert small.state is not State.WAITING
    assert served("late") < served("modest") and not any(sequence.finished for sequence in [*greedy, *late])


def test_blocks_that_are_about_to_change_hands_are_nobody_elses() -> None:
    """Who gives them has a step in flight; meanwhile who is first in the queue fits into what is free already."""
    simulation = Simulation(num_blocks=64, block_size=1, max_model_len=64, depth=3, share_prefixes=False)
    simulation.submit([7], tenant="modest", max_tokens=30)
    simulation.drain()
    greedy = [simulation.submit([6] * 8, tenant="greedy", max_tokens=40)[0] for _ in range(2)]
    for _ in range(7):
        simulation.step()
    simulation.submit([5] * 6, tenant="least", max_tokens=40)
    simulation.step()
    (first,) = simulation.submit([8] * 16, tenant="least", max_tokens=SHORT)
    (large,) = simulation.submit([7] * 32, tenant="modest", max_tokens=SHORT)
    while large.state is State.WAITING:
        simulation.step()
    assert first.state is State.WAITING and not any(sequence.finished for sequence in greedy)
    assert simulation.scheduler.stats.num_preemptions == 1
    simulation.drain()


def test_the_beginning_of_a_request_gets_a_slot_of_a_batch() -> None:
    simulation = Simulation(max_num_seqs=3, num_blocks=64)
    batch = [simulation.submit([5, rank + 2], max_tokens=LONG, rank=rank)[0] for rank in range(3)]
    for _ in range(3):
        simulation.step()
    (small,) = simulation.submit([7], max_tokens=SHORT)
    for _ in range(2):
        simulation.step()
    assert small.state is not State.WAITING
    assert [sequence.state for sequence in batch] == [State.RUNNING, State.RUNNING, State.WAITING]
    simulation.drain()


def test_slots_change_hands_only_after_a_while() -> None:
    simulation = Simulation(max_num_seqs=1, num_blocks=64)
    batch = [simulation.submit([5, rank + 2], max_tokens=LONG, rank=rank + 1)[0] for rank in range(2)]
    simulation.plan()
    simulation.commit()
    (small,) = simulation.submit([7], max_tokens=SHORT)
    simulation.now = small.arrival_time - 1.0 + PATIENCE_SECONDS / 2
    simulation.plan()
    assert simulation.scheduler.stats.num_preemptions == 0 and batch[0].state is State.RUNNING


def test_a_suspect_of_crashes_keeps_its_slot() -> None:
    """A suspect runs alone, so no other request could use the slot."""
    simulation = Simulation(max_num_seqs=1, num_blocks=64, max_num_batched_tokens=1)
    (suspect,) = simulation.submit([5, 6], max_tokens=SHORT, rank=1)
    for _ in range(2):
        simulation.plan()
        simulation.fail()
    simulation.plan()
    simulation.submit([7], max_tokens=SHORT)
    simulation.now += 2 * PATIENCE_SECONDS
    simulation.commit()
    simulation.plan()
    assert suspect.suspect and not simulation.scheduler.stats.num_preemptions
    simulation.drain()


def test_a_full_queue_has_room_for_a_tenant_that_has_nothing_in_it() -> None:
    """Each of the tenants that wait may take its equal share of the room, whoever came first."""
    simulation = Simulation(max_num_seqs=1, num_blocks=64)
    start_flood(simulation, 41, tenant="greedy")
    waiting, tenants = simulation.scheduler.waiting, simulation.scheduler.waiting.tenants
    assert len(waiting) == waiting.num_before(tenants.get("greedy")) == 40
    assert waiting.num_before(tenants.get("modest")) == 0
    for _ in range(3):
        simulation.submit([7], tenant="modest")
    assert waiting.num_before(tenants.get("modest")) == 6
    assert waiting.num_before(tenants.get("greedy")) == 43


def test_tenants_that_are_gone_are_forgotten() -> None:
    tenants = Accounts(1 << 30)
    live = [tenants.get(f"live{i}") for i in range(10)]
    for tenant in live:
        tenant.num_running = 1
    for i in range(5 * MAX_IDLE):
        gone = tenants.get(f"gone{i}")
        gone.num_output_tokens = i
        assert len(tenants) <= MAX_IDLE + len(live)
    assert all(tenants.get(tenant.name) is tenant for tenant in live)
    assert tenants.get(f"gone{5 * MAX_IDLE - 1}").num_output_tokens  # the most served are remembered longest
