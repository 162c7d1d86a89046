"""Logits processors against their definition: each row by itself, from its parameters and tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.ipc.models.own_code import ProcessorSource, processor_sources
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan, WorkerConfig
from pagewire.workers.device.cpu import CpuTokenSampler
from pagewire.workers.errors import LoadError
from pagewire.workers.process.open_parts import open_processors
from pagewire.workers.run.processors import LogitsProcessors
from pagewire.workers.run.runner import Runner
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.sampler import SampleOutput, SamplingSlot, sample
from tests.workers.architectures import VOCAB_SIZE
from tests.workers.driver import Driver, load_runner, tokens_of, values
from tests.workers.parity import make_prompts
from tests.workers.sample.own_processors import pushed

CODE = "tests.workers.sample.own_processors"
VOCAB = 50


def opened(*options: str) -> LogitsProcessors:
    config = WorkerConfig("", logits_processors=processor_sources(options))
    return open_processors(config, torch.device("cpu"))


def make_slot(number: int, **fields: Any) -> SamplingSlot:
    """One with a prompt of its own; half of them greedy."""
    fields = {"temperature": float(number % 2), "logprobs": 2, "presence_penalty": 0.5} | fields
    prompt = np.arange(number + 1)
    return SamplingSlot(SamplingParams(**fields), number, [], prompt, len(prompt), len(prompt), VOCAB, True)


def run(processors: LogitsProcessors, logits: torch.Tensor, slots: Sequence[SamplingSlot]) -> SampleOutput:
    return processors.launch(CpuTokenSampler(), logits, slots, TokenMasks()).finish()


@pytest.mark.parametrize("options", [[f"{CODE}:Pusher"], [f"{CODE}:push"], [f"own={CODE}:Pusher"]])
def test_a_batch_that_changes_all_the_time(options: list[str]) -> None:
    """Rows come, go, change places, and run ahead of their sequences with drafts."""
    processors, rng = opened(*options), random.Random(5)
    named = "=" in options[0]
    live: list[SamplingSlot] = []
    for step in range(60):
        live = [slot for slot in live if rng.random() > 0.15]
        number = len(live) + step
        live.append(make_slot(number, logits_processors=["own"] if named and number % 3 else None))
        chosen = rng.sample(live, rng.randint(1, len(live)))
        states = [
            slot.ahead([rng.randrange(VOCAB) for _ in range(ahead)])
            for slot in chosen
            for ahead in range(rng.choice([1, 1, 3]))
        ]
        logits = torch.randn(len(states), VOCAB).to(rng.choice([torch.float32, torch.bfloat16]))
        found = run(processors, logits, states)
        for row, state in enumerate(states):
            own = logits[row].float()
            if not named or state.params.logits_processors:
                own = pushed(2.0, state.history.prompt_ids, state.history.output_ids, own.clone())
            assert [found.token_ids[row]] == sample(own[None], [state]).token_ids
            raw = sample(logits[row : row + 1], [make_slot(0)]).logprobs[0]
            assert values(found.logprobs[row])[1][1:] == values(raw)[1][1:]  # those of the raw logits
        for slot in chosen:
            slot.append(rng.randrange(VOCAB))


def test_an_error_ends_its_own_row_alone() -> None:
    processors = opened(f"{CODE}:Pusher", f"{CODE}:OnlyLater")
    slots = [make_slot(i, temperature=0.0) for i in range(5)]
    slots[1] = make_slot(1, extra_args={"push": "invalid"})
    slots[3] = make_slot(3, extra_args={"push": "broken"})
    for _ in range(3):  # later steps, too: what the processor knows of the others is right again
        logits = torch.randn(5, VOCAB)
        logits[:, 0] = 50.0
        found = run(processors, logits, slots)
        assert found.error_types == {1: "ValueError"}
        assert found.errors == {
            1: f"the logits processor {CODE}:Pusher failed: ValueError: push must be a number",
            3: f"the logits processor {CODE}:Pusher failed: RuntimeError: a bug",
        }
        for row in (0, 2, 4):
            history = slots[row].history
            own = pushed(2.0, history.prompt_ids, history.output_ids, logits[row].clone())
            own[0] = own[0] if history.output_ids else -torch.inf
            assert [found.token_ids[row]] == sample(own[None], [slots[row]]).token_ids
            slots[row].append(found.token_ids[row])


def test_greedy_rows_need_no_processor_that_keeps_the_largest_logit() -> None:
    logits, slots = torch.randn(4, VOCAB), [make_slot(i) for i in range(4)]
    expected = sample(torch.where(torch.tensor([[0], [1], [0], [1]]) > 0, logits * 3, logits), slots)
    assert run(opened(f"{CODE}:Sharper"), logits, slots).token_ids == expected.token_ids


def test_a_processor_on_the_base_of_vllms_documents() -> None:
    processors, slots = opened(f"{CODE}:AsDocumented"), [make_slot(i) for i in range(4)]
    slots[1].append(3)
    assert run(processors, torch.randn(4, VOCAB), slots).token_ids == [7, 8, 7, 7]


def test_a_result_of_another_shape_is_an_error() -> None:
    found = run(opened(f"{CODE}:without_result"), torch.randn(1, VOCAB), [make_slot(0)])
    assert found.errors[0].endswith("TypeError: it must return a tensor of floats, got NoneType")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("tests.nowhere:f", "tests.nowhere:f: .*No module named 'tests.nowhere'"),
        (f"{CODE}:CODE", "has no attribute 'CODE'"),
        (f"{CODE}:Weights", "missing 1 required positional argument"),
        ("os:getcwd", "a function takes"),
    ],
)
def test_what_is_no_processor(option: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        opened(option)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token_of_a_processed_sequence(llama: Path, temperature: float) -> None:
    """A verified position has the processor's view of its own tokens."""
    runner, _ = load_runner(llama, logits_processors=(ProcessorSource(f"{CODE}:Pusher", "own"),))
    params = SamplingParams(temperature=temperature, logprobs=1, logits_processors=["own"])
    plain = SamplingParams(temperature=temperature, logprobs=1)
    [prompt] = make_prompts(VOCAB_SIZE, [9])
    [alone], [other] = (Driver(runner).run([prompt], 6, p, seeds=[5]) for p in (params, plain))
    assert alone.output != other.output
    assert verified(runner, prompt, params, alone.output) == alone.output


def verified(runner: Runner, prompt: list[int], params: SamplingParams, expected: list[int]) -> list[int]:
    """The tokens of steps with drafts: two right ones and a wrong one, then three right ones."""
    wrong = (expected[3] + 1) % VOCAB_SIZE
    begin = SlotInit(2, prompt, 9, [20, 21, 22, 23], params, seed=5)
    first = runner.step(StepPlan(0, [Row(2, 0, 9, num_samples=1)], [begin]))
    second = runner.step(StepPlan(1, [Row(2, 9, 4, [], [*expected[1:3], wrong], 4)]))
    third = runner.step(StepPlan(2, [Row(2, 12, 2, [], expected[4:5], 2)]))
    assert [len(tokens_of(result)) for result in (first, second, third)] == [1, 3, 2]
    return tokens_of(first) + tokens_of(second) + tokens_of(third)
