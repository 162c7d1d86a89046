"""Ranks of a pipeline under the real scheduler: each has a copy of it, which decides the same, since it is pure.

A rank runs a plan as soon as it is made, and commits it when the last stage has its result. So the first stage is
ahead of the last by as many steps as the scheduler lets be in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagewire.engine_core.adapters.adapter import Adapter
from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.sequence import sequences
from pagewire.engine_core.schedule.speculation import Speculation
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tenants.accounts import Account, Accounts
from pagewire.engine_core.tenants.waiting import WaitingQueue
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.lora import AdapterSource
from pagewire.ipc.wire.messages import Request, TokenDelta
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import StepPlan, StepResult
from pagewire.workers.module.configuration import load_config, state_layers
from pagewire.workers.run.runner import Runner
from tests.workers.driver import values
from tests.workers.parallel.threads import Rank
from tests.workers.parity import NUM_TOKENS

MAX_MODEL_LEN = 64
NUM_STATES = 16
SAMPLED = SamplingParams(
    temperature=0.7, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=1
)


@dataclass
class Output:
    """What came of a sequence: tokens, and log probabilities to the bit."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=lambda: [[], [], []])
    prompt_logprobs: list[list[Any]] = field(default_factory=lambda: [[], [], []])

    def take(self, delta: TokenDelta) -> None:
        """Add a delta."""
        assert delta.error is None, delta.error
        self.tokens += delta.token_ids
        for rows, found in ((delta.logprobs, self.logprobs), (delta.prompt_logprobs, self.prompt_logprobs)):
            for column, more in zip(found, () if rows is None else values(rows), strict=False):
                column += more


class Steps:
    """Runs plans on a runner, in their order; in a pipeline all ranks get the results of the last stage."""

    def __init__(self, runner: Runner, rank: Rank | None) -> None:
        self.runner, self.rank = runner, rank
        self.results: deque[StepResult] = deque()
        self.most_ahead = 0

    def run(self, plan: StepPlan) -> None:
        """Run a plan."""
        result = self.runner.step(plan)
        rank, parallel = self.rank, self.runner.config.parallel
        if rank is None or rank.rank == rank.size - parallel.num_shards:
            self.results.append(result)
            for target in range(0 if rank is None else rank.size):
                if rank is not None and target != rank.rank:
                    rank.send_object(result, target)
        assert self.runner.model.model.is_last or not result.rows

    def result(self) -> StepResult:
        """The next result."""
        if self.results or self.rank is None:
            return self.results.popleft()
        source = self.rank.size - self.runner.config.parallel.num_shards
        result: StepResult = self.rank.receive_object(source)
        return result


def generate(
    runner: Runner,
    prompts: Sequence[list[int] | Prompt],
    rank: Rank | None = None,
    params: SamplingParams = SAMPLED,
    budget: int = 24,
    num_blocks: int | None = None,
    speculation: Speculation | None = None,
    adapters: Sequence[int] = (),
) -> tuple[list[Output], Scheduler]:
    """What becomes of prompts that are submitted together.

    budget: tokens of all steps in flight. adapters: the index of each one's; none: no prompt has any.
    """
    stages = runner.config.parallel.stages
    # A stage may have layers without states only, and all ranks must make the same plans.
    has_states = state_layers(load_config(runner.config))
    groups = [StateSlots(NUM_STATES, runner.config.block_size)] if has_states else []
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks or runner.num_blocks,
            block_size=runner.config.block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=runner.config.max_num_seqs,
            max_num_batched_tokens=budget // stages,
            depth=max(2, stages),
            stages=stages,
        ),
        WaitingQueue("fcfs", Accounts(1 << 30)),
        speculation,
        groups=groups,
    )
    outputs = [Output() for _ in prompts]
    for key, prompt in enumerate(prompts):
        content = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        index = adapters[key] if adapters else 0
        if index:
            content = msgspec.structs.replace(content, adapter=bytes([index]))
        request = Request(key, str(key), content, params, seed=key)
        for sequence in sequences(
            request,
            b"test",
            key,
            0.0,
            max_model_len=MAX_MODEL_LEN,
            share_prefixes=True,
            tenant=Account(b"test"),
        ):
            sequence.adapter = Adapter(AdapterSource(f"a{index}", index), index=index) if index else None
            scheduler.add(sequence)
    steps, num_in_flight = Steps(runner, rank), 0
    while scheduler.num_unfinished or num_in_flight:
        plan = scheduler.plan(0.0) if num_in_flight < scheduler.config.depth else None
        if plan is not None:
            steps.run(plan)
            num_in_flight += 1
            continue
        num_in_flight -= 1
        for sequence, delta in scheduler.commit(steps.result(), 0.0):
            outputs[sequence.key].take(delta)
    return outputs, scheduler
