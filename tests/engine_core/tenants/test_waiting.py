"""The queue of waiting sequences when some of them are taken back."""

from __future__ import annotations

from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.engine_core.tenants.accounts import Accounts
from pagewire.engine_core.tenants.waiting import WaitingQueue
from pagewire.ipc.suspicion import Suspicion
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request


def test_sequences_are_withdrawn_in_the_order_of_arrival_and_may_be_queued_again() -> None:
    tenants = Accounts(1 << 30)
    waiting = WaitingQueue("fcfs", tenants)
    scheduler = Scheduler(SchedulerConfig(num_blocks=64, block_size=4, max_model_len=64), waiting)
    all_of_them: list[Sequence] = []
    for arrival in range(9):
        tenant = tenants.get(f"tenant {arrival % 2}")
        request = Request(arrival, "r", Prompt([1, 2]), SamplingParams(), 0)
        all_of_them += sequences(
            request, b"c", arrival, 0.0, max_model_len=64, share_prefixes=True, tenant=tenant
        )
    suspect = all_of_them[4]
    suspect.suspicion = Suspicion(num_in_row=2, num_in_all=2)
    for sequence in reversed(all_of_them):
        scheduler.add(sequence)
    odd = [sequence for sequence in all_of_them if sequence.arrival % 2]
    chosen = [suspect, *odd]
    assert scheduler.waiting.withdraw(lambda sequence: sequence in chosen) == sorted(
        chosen, key=lambda sequence: sequence.arrival
    )
    assert scheduler.sequences.num_waiting == 4 and not scheduler.waiting.suspects
    assert tenants.get("tenant 1").num_waiting == 0
    for sequence in chosen:
        scheduler.add(sequence)
    assert scheduler.sequences.num_waiting == 9 and scheduler.waiting.suspects == [suspect]
    scheduler.abort([suspect])
    plan = scheduler.plan(1.0)
    assert plan is not None and len(plan.rows) == 8
