"""Drives a runner whose drafter proposes tokens: what it proposes is in the next row, as the core would put it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from pagewire.ipc.speculative import Method, SpeculativeConfig
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.workers.run.runner import Runner
from pagewire.workers.speculation.interface import Drafter
from pagewire.workers.speculation.open import open_drafter
from tests.workers.driver import load_runner

NUM_DRAFTS = 5


def runner_with(
    folder: Path,
    drafter: Path | None,
    method: Method = "draft_model",
    num_drafts: int = NUM_DRAFTS,
    **fields: Any,
) -> Runner:
    """A runner of a model with a drafter; without one: the same without drafts."""
    speculative = None
    if drafter is not None:
        speculative = SpeculativeConfig(method, str(drafter), num_drafts)
    return load_runner(folder, speculative=speculative, **fields)[0]


def open_for(runner: Runner, drafter: Path, method: Method, num_drafts: int = NUM_DRAFTS) -> Drafter:
    """Open a drafter for a model that is loaded, as a start of the worker does."""
    speculative = SpeculativeConfig(method, str(drafter), num_drafts)
    config = msgspec.structs.replace(runner.config, speculative=speculative)
    parts = (runner.model, runner.slots, runner.phases, runner.device, runner.sampler, runner.collective)
    return open_drafter(config, *parts)


@dataclass
class Proposal:
    """Drafts, and the tokens that they were to follow."""

    before: list[int]
    drafts: list[int]


@dataclass
class Speculated:
    """A sequence that runs with drafts in a slot.

    computed: tokens whose KV the model has. proposals: all that were made for it. content: its prompt's embeddings.
    """

    slot: int
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    num_accepted: int = 0
    adapter: int = 0
    is_new: bool = True
    content: Prompt = field(default_factory=lambda: Prompt([]))

    @property
    def output(self) -> list[int]:
        """Its tokens behind the prompt."""
        return self.tokens[self.num_prompt_tokens :]


class SpeculativeDriver:
    """Runs sequences in steps of at most `budget` tokens, with blocks in no helpful order.

    wanted: the drafts to ask for, by step and slot.
    """

    def __init__(
        self,
        runner: Runner,
        budget: int = 64,
        wanted: Callable[[int, int], int] = lambda step, slot: NUM_DRAFTS,
    ) -> None:
        self.runner, self.budget, self.wanted = runner, budget, wanted
        self.free = list(range(runner.num_blocks))[::-1]
        self.num_steps = 0
        self._freed: list[int] = []

    def add(
        self,
        slot: int,
        prompt: Sequence[int] | Prompt,
        params: SamplingParams,
        seed: int = 0,
        cached: Sequence[int] = (),
        num_prompt_tokens: int | None = None,
    ) -> Speculated:
        """A sequence for a slot. cached: blocks that hold its beginning already."""
        content = prompt if isinstance(prompt, Prompt) else Prompt(list(prompt))
        tokens = list(content.token_ids)
        length = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        computed = len(cached) * self.runner.config.block_size
        return Speculated(slot, tokens, length, params, seed, list(cached), computed, content=content)

    def run(self, sequences: Sequence[Speculated], num_tokens: int) -> None:
        """Run sequences until each has at least `num_tokens` tokens of output."""
        while active := [s for s in sequences if len(s.output) < num_tokens]:
            self.step(active)

    def step(self, sequences: Sequence[Speculated]) -> None:
        """Run one step of each sequence, as far as the budget reaches."""
        budget, rows, scheduled, inits = self.budget, [], [], []
        for s in sequences:
            count = min(len(s.tokens) - s.computed, budget)
            if not count:
                break
            whole = s.computed + count == len(s.tokens)
            drafts = s.drafts[: budget - count] if whole else []
            num_tokens = count + len(drafts)
            budget -= num_tokens
            new = self._grow(s, s.computed + num_tokens)
            if s.is_new:
                s.is_new = False
                inits.append(self._init(s))
                new = []
            wanted = self.wanted(self.num_steps, s.slot) if whole else 0
            num_samples = 1 + len(drafts) if whole else 0
            row = Row(s.slot, s.computed, num_tokens, new, drafts, num_samples, num_drafts=wanted)
            row.media = s.content.embeddings(s.computed, s.computed + num_tokens)
            rows.append(row)
            scheduled.append(s)
        result = self.runner.step(StepPlan(self.num_steps, rows, inits, self._freed))
        self._freed = []
        self.num_steps += 1
        for s, row, got in zip(scheduled, rows, result.rows, strict=True):
            assert got.error is None and len(got.drafts) <= row.num_drafts
            s.tokens += got.token_ids
            s.computed += row.num_tokens - (row.num_samples - len(got.token_ids) if row.num_samples else 0)
            s.num_accepted += max(0, len(got.token_ids) - 1)
            s.drafts = got.drafts
            if got.drafts:
                s.proposals.append(Proposal(list(s.tokens), got.drafts))

    def end(self, sequence: Speculated, *, keep_blocks: bool = False) -> list[int]:
        """Free a sequence's slot, and its blocks unless they are kept; returns its blocks."""
        self._freed.append(sequence.slot)
        if not keep_blocks:
            self.free += sequence.blocks[::-1]
        return sequence.blocks

    def _grow(self, sequence: Speculated, num_tokens: int) -> list[int]:
        needed = -(-num_tokens // self.runner.config.block_size) - len(sequence.blocks)
        new = [self.free.pop() for _ in range(max(0, needed))]
        sequence.blocks += new
        return new

    @staticmethod
    def _init(s: Speculated) -> SlotInit:
        fields = (s.slot, list(s.tokens), s.num_prompt_tokens, list(s.blocks), s.params, s.seed)
        return SlotInit(*fields, media=s.content.places(), adapter=s.adapter)


class DraftOracle:
    """A draft model as transformers runs it, without a cache: what it proposes greedily."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def check(self, proposals: Sequence[Proposal]) -> None:
        """Assert that each draft is the likeliest token after those before it."""
        assert proposals
        for proposal in proposals:
            ids = proposal.before + proposal.drafts[:-1]
            with torch.inference_mode():
                logits = self.model(torch.tensor([ids])).logits[0, len(proposal.before) - 1 :]
            assert logits.argmax(-1).tolist() == proposal.drafts, f"after {len(proposal.before)} tokens"
