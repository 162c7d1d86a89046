"""The real scheduler drives a real runner in this process, with steps in flight as the core keeps them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.sequence import sequences
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tenants.accounts import Account, Accounts
from pagewire.engine_core.tenants.waiting import WaitingQueue
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Request
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import StepPlan
from pagewire.workers.run.runner import Runner
from tests.workers.parity import NUM_TOKENS

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


@dataclass(frozen=True)
class Setting:
    """One way to schedule."""

    name: str
    budget: int = 16
    num_blocks: int = 64
    share_prefixes: bool = True
    depth: int = 2


SETTINGS = (
    Setting("one step at a time", depth=1, share_prefixes=False),
    Setting("overlap and cache"),
    Setting("whole prompts", budget=256),
    Setting("few blocks", num_blocks=MAX_MODEL_LEN // BLOCK_SIZE),
    Setting("few blocks, no overlap, no cache", num_blocks=16, depth=1, share_prefixes=False),
)


def run(
    runner: Runner,
    setting: Setting,
    prompts: Sequence[list[int] | Prompt],
    max_model_len: int = MAX_MODEL_LEN,
) -> tuple[list[list[int]], Scheduler]:
    """All prompts at once, twice over, so that the second round may find cached prefixes."""
    config = SchedulerConfig(
        num_blocks=setting.num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=setting.budget,
        depth=setting.depth,
    )
    num_states = runner.num_states
    groups = [StateSlots(num_states, BLOCK_SIZE, 2 * BLOCK_SIZE)] if num_states else []
    scheduler = Scheduler(config, WaitingQueue("fcfs", Accounts(1 << 30)), groups=groups)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs: list[list[int]] = [[] for _ in range(2 * len(prompts))]
    for key, prompt in enumerate([*prompts, *prompts]):
        content = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        submitted = Request(key, str(key), content, params, seed=0)
        (request,) = sequences(
            submitted,
            b"test",
            key,
            0.0,
            max_model_len=max_model_len,
            share_prefixes=setting.share_prefixes,
            tenant=Account(b"test"),
            short_length=runner.model.short_length,
        )
        scheduler.add(request)
    launched: deque[StepPlan] = deque()
    while scheduler.num_unfinished:
        plan = scheduler.plan(0.0) if len(launched) < setting.depth else None
        if plan is not None:
            launched.append(plan)
            continue
        for request, delta in scheduler.commit(runner.step(launched.popleft()), 0.0):
            outputs[request.key] += delta.token_ids
    while launched:  # rows of requests that have ended
        scheduler.commit(runner.step(launched.popleft()), 0.0)
    return outputs, scheduler
