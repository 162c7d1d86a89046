"""A scheduler of a few lines: drives a runner with hand-made plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.ipc.wire.items import LogprobRows, Prompt
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import (
    Parallel,
    Ready,
    Row,
    RowResult,
    SlotInit,
    StepPlan,
    StepResult,
    WorkerConfig,
)
from pagewire.workers.process.wiring import open_runner
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.run.runner import Runner

GREEDY = SamplingParams(temperature=0.0)


def load_runner(
    folder: Path,
    collective: Collective | None = None,
    wake: Callable[[], None] = lambda: None,
    **fields: Any,
) -> tuple[Runner, Ready]:
    """A runner of small sizes; with a collective, a rank of a group."""
    if collective is not None:
        fields.setdefault("parallel", Parallel(collective.rank, collective.size))
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "num_blocks": 64, "block_size": 4}
    sizes["allowed_save_path"] = "/"
    config = WorkerConfig(str(folder), **(sizes | {"num_threads": 1} | fields))
    return open_runner(config, lambda *_: None, collective=collective, wake=wake)


@dataclass
class Request:
    """One request as the driver sees it."""

    slot: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    num_blocks: int = 0
    state: int = -1
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: list[LogprobRows] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    error_types: list[str | None] = field(default_factory=list)
    content: Prompt = field(default_factory=lambda: Prompt([]))

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def advance(self, num_tokens: int) -> list[tuple[int, int]]:
        """Where a row keeps its states: in the slot that it reads, or of several tokens in the request's other."""
        if self.state < 0 or num_tokens > 1:
            self.state = 2 * self.slot + (self.state == 2 * self.slot)
        ends = {self.computed + num_tokens // 2, self.computed + num_tokens} - {self.computed}
        return [(end, self.state) for end in sorted(ends)]

    def take(self, result: RowResult) -> None:
        """Keep the result of a row."""
        self.output += result.token_ids
        if result.logprobs is not None:
            self.logprobs.append(values(result.logprobs))
        if result.prompt_logprobs is not None:
            self.prompt_logprobs.append(result.prompt_logprobs)
        if result.error is not None:
            self.errors.append(result.error)
            self.error_types.append(result.error_type)
            self.output.append(0)  # so that the request ends


class Driver:
    """Runs prompts to a number of tokens each, at most `budget` tokens a step, chunking prompts."""

    def __init__(self, runner: Runner, budget: int = 16) -> None:
        self.runner, self.budget = runner, budget
        self.free = list(range(runner.num_blocks))[::-1]  # blocks in no helpful order
        self.step_id = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int] | Prompt],
        num_tokens: int,
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        seeds: Sequence[int] | None = None,
        adapters: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """The output of each prompt. adapters: the index of each one's."""
        return [s.output for s in self.run(prompts, num_tokens, params, seeds, adapters)]

    def run(
        self,
        prompts: Sequence[Sequence[int] | Prompt],
        num_tokens: int,
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        seeds: Sequence[int] | None = None,
        adapters: Sequence[int] | None = None,
    ) -> list[Request]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        contents = [p if isinstance(p, Prompt) else Prompt(list(p)) for p in prompts]
        sequences = [
            Request(i, p.token_ids, each[i], seeds[i] if seeds else i, content=p)
            for i, p in enumerate(contents)
        ]
        inits = [
            SlotInit(
                s.slot,
                s.prompt,
                len(s.prompt),
                [],
                s.params,
                s.seed,
                [],
                s.content.places(m.data for m in s.content.encoded),
            )
            for s in sequences
        ]
        for init, adapter in zip(inits, adapters or (), strict=False):
            init.adapter = adapter
        while any(len(s.output) < num_tokens for s in sequences):
            rows, scheduled = self._rows([s for s in sequences if len(s.output) < num_tokens])
            new = [init for init in inits if init.slot in {row.slot for row in rows}]
            inits = [init for init in inits if init not in new]
            self._run(rows, scheduled, new)
        self.runner.step(StepPlan(-1, [], [], [s.slot for s in sequences]))
        return sequences

    def _rows(self, sequences: list[Request]) -> tuple[list[Row], list[Request]]:
        budget, rows, scheduled = self.budget, [], []
        for s in sequences:
            n = self._chunk(s, min(s.length - s.computed, budget))
            if n == 0:
                break
            budget -= n
            needed = -(-(s.computed + n) // self.runner.config.block_size) - s.num_blocks
            blocks = [self.free.pop() for _ in range(needed)]
            s.num_blocks += needed
            asked = s.params.prompt_logprobs is not None
            known = max(0, min(s.computed + n, len(s.prompt) - 1) - s.computed) if asked else 0
            last = s.computed + n == s.length
            media = s.content.embeddings(s.computed, s.computed + n)
            row = Row(s.slot, s.computed, n, blocks, [], int(last), known, media=media)
            if self.runner.num_states:
                row.state, row.states = s.state, s.advance(n)
            rows.append(row)
            scheduled.append(s)
        return rows, scheduled

    def _chunk(self, request: Request, count: int) -> int:
        """How many of the next `count` tokens of a request a step runs."""
        return count

    def _run(self, rows: list[Row], scheduled: list[Request], inits: list[SlotInit]) -> None:
        self.step_id += 1
        result = self.runner.step(StepPlan(self.step_id, rows, inits))
        assert result.step_id == self.step_id
        for row, row_result, s in zip(rows, result.rows, scheduled, strict=True):
            assert row_result.error is not None or len(row_result.token_ids) == row.num_samples
            s.computed += row.num_tokens
            s.take(row_result)


def tokens_of(result: StepResult) -> list[int]:
    """All tokens of a step, in the order of its rows."""
    return [token_id for i in range(result.num_rows) for token_id in result.row(i).token_ids]


def values(rows: LogprobRows) -> tuple[list[int], list[float], list[int]]:
    """Token ids, log probabilities and ranks as flat lists."""
    return rows.token_ids.tolist(), rows.logprobs.tolist(), rows.ranks.tolist()
