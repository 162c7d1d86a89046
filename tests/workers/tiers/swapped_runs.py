"""Runs of the real scheduler and a real runner whose preempted sequences leave their blocks in swap space."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.sequence import sequences
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tenants.accounts import Account, Accounts
from pagewire.engine_core.tenants.waiting import WaitingQueue
from pagewire.engine_core.tiers.costs import ReadCosts
from pagewire.engine_core.tiers.reads import PrefixReads
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Request
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import StepPlan
from pagewire.workers.run.runner import Runner

NUM_TOKENS = 24
PROMPTS = [[7 + 3 * number + 2 * i for i in range(17)] for number in range(4)]


@dataclass
class SwappedRun:
    """What came of one.

    tokens: of each prompt. num_preemptions: for want of blocks. num_hits: blocks from swap space.
    """

    tokens: list[list[int]]
    num_preemptions: int
    num_hits: int
    reads: PrefixReads


def run(
    runner: Runner,
    told: threading.Event,
    num_blocks: int,
    block_size: int,
    prompts: Sequence[list[int]] = PROMPTS,
    num_states: int = 0,
) -> SwappedRun:
    """All prompts at once, with so many blocks. told: set when the worker's tier has reports.

    What is in swap space is always copied back.
    """
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        depth=2,
    )
    groups = [StateSlots(num_states, block_size, 2 * block_size)] if num_states else []
    reads = PrefixReads(ReadCosts(block_size), on_disk=False, preemption="swap")
    scheduler = Scheduler(config, WaitingQueue("fcfs", Accounts(1 << 30)), None, reads, groups)
    reads.swap.open(*runner.tier.swap_size)
    scheduler.kv.pool.evicted = []
    for group in groups:
        group.pool.evicted = []
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens: list[list[int]] = [[] for _ in prompts]
    for key, prompt in enumerate(prompts):
        submitted = Request(key, str(key), Prompt(prompt), params, seed=0)
        for sequence in sequences(
            submitted,
            b"test",
            key,
            0.0,
            max_model_len=64,
            share_prefixes=True,
            tenant=Account(b"test"),
        ):
            scheduler.add(sequence)
    launched: deque[StepPlan] = deque()
    while scheduler.num_unfinished or launched:
        plan = scheduler.plan(0.0) if len(launched) < config.depth else None
        for message in reads.take_moves(scheduler.kv, 0.0):
            runner.tier.move(message)
        if plan is not None:
            launched.append(plan)
            continue
        if launched:
            for sequence, delta in scheduler.commit(runner.step(launched.popleft()), 0.0):
                tokens[sequence.request.key] += delta.token_ids
        else:
            assert reads.num_reads and told.wait(60), "nothing will ever run"
        told.clear()
        for report in runner.tier.take_reports():
            for moved in report.moved:
                for sequence in reads.finish(moved, scheduler.kv):
                    scheduler.sequences.release(sequence)
    return SwappedRun(tokens, scheduler.stats.num_cache_preemptions, reads.num_swap_hits, reads)
