"""Plans that only decode: compiled tokens are those of `RunningStep`, and launches end when they must."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan, StepResult
from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.workers.module.transforms import QuantisedEmbedding
from pagewire.workers.run.decoding import Decoding
from pagewire.workers.run.interface import Quiet
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import EXPERTS, GROUPED, SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import GREEDY, Driver, load_runner
from tests.workers.gguf_files import write_gguf
from tests.workers.parity import make_prompts, transformers_tokens
from tests.workers.run.counted import Count

TAKEN = [
    Architecture("llama", GROUPED),
    Architecture("qwen2", GROUPED),
    Architecture("qwen3_moe", GROUPED | EXPERTS),
    Architecture("mistral", GROUPED | {"sliding_window": 7}),
    Architecture("qwen3", GROUPED),
    *(SERVED[name] for name in ("gpt2", "bloom", "nanochat")),
    *(SERVED[name] for name in ("afmoe", "dbrx")),
    SERVED["deepseek_v2"],
    SERVED["glm_moe_dsa"],  # an indexer, and a layer that follows it
]
STATES = [
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
]
LEFT = ["diffllama", "zaya"]
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.5, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=1.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, repetition_penalty=0.5, presence_penalty=-1.0, frequency_penalty=0.7),
    SamplingParams(temperature=0.8, frequency_penalty=1.5, top_k=20),
]
OTHERS = [
    SamplingParams(temperature=1.0, bad_words_token_ids=[[5]]),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.0, logit_bias={5: 4.0}),
]

pytestmark = pytest.mark.skipif(cpu_kernels.load() is None, reason="no compiled kernels here")


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch, Decoding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", [*TAKEN, *(SERVED[name] for name in STATES)], ids=lambda a: a.name)
def test_both_ways_sample_the_same_tokens(
    architecture: Architecture, dtype: str, count: Count, tmp_path: Path
) -> None:
    runner, _ = load_runner(architecture.write(tmp_path), dtype=dtype)
    prompts = make_prompts(VOCAB_SIZE, [3, 9, 1, 14, 6, 8, 2])
    for number, params in enumerate([PARAMS, [*PARAMS[2:], *OTHERS[:2]]]):
        seeds = [7, -5, 2**60, 3 + number, 1, 2, 6]
        count.is_on = True
        found = Driver(runner).generate(prompts, 12, params, seeds)
        count.is_on = False
        assert found == Driver(runner).generate(prompts, 12, params, seeds)
    assert count.taken >= 10


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_embeddings_that_stay_quantised(kind: str, count: Count, tmp_path: Path) -> None:
    folder = TAKEN[0].write(tmp_path / "checkpoint")
    path = write_gguf(
        tmp_path / "model.gguf",
        folder,
        TAKEN[0].config(),
        "llama",
        kind=lambda name, values: "F32" if values.ndim == 1 or values.shape[1] % 32 else kind,
    )
    runner, _ = load_runner(path)
    assert isinstance(runner.model.model.base.words, QuantisedEmbedding)
    prompts = make_prompts(VOCAB_SIZE, [3, 9])
    found = Driver(runner).generate(prompts, 8)
    assert count.taken == 7
    count.is_on = False
    assert found == Driver(runner).generate(prompts, 8)


@pytest.mark.parametrize("name", LEFT)
def test_other_models_go_the_other_way(name: str, count: Count, tmp_path: Path) -> None:
    folder = SERVED[name].write(tmp_path)
    prompts = make_prompts(VOCAB_SIZE, [3, 9])
    assert Driver(load_runner(folder)[0]).generate(prompts, 6) == transformers_tokens(folder, prompts, 6)
    assert count.taken == 0


@pytest.mark.parametrize("params", OTHERS)
def test_sequences_with_changed_logits_go_the_other_way(
    runner: Runner, params: SamplingParams, count: Count
) -> None:
    Driver(runner).generate(make_prompts(VOCAB_SIZE, [3]), 4, params)
    assert count.taken == 0


# ---------------------------------------------------------------- several steps


def begin(
    runner: Runner, lengths: list[int], params: SamplingParams, ends: list[int] | None = None
) -> list[int]:
    """Run prompts in one step; their lengths, where each goes on."""
    prompts = make_prompts(VOCAB_SIZE, lengths)
    inits = [
        SlotInit(i, prompt, len(prompt), list(range(1 + 10 * i, 11 + 10 * i)), params, 11 * i, ends or [])
        for i, prompt in enumerate(prompts)
    ]
    rows = [Row(i, 0, len(prompt), num_samples=1) for i, prompt in enumerate(prompts)]
    runner.step(StepPlan(0, rows, inits))
    return lengths


def launch(runner: Runner, starts: list[int], num_steps: int, quiet: Quiet | None = None) -> StepResult:
    """The result of a plan for several steps."""
    rows = [Row(i, start, 1, num_samples=1) for i, start in enumerate(starts)]
    step = runner.launch(StepPlan(1, rows, num_steps=num_steps), quiet)
    step.sample(lambda: None)
    result = step.finish()
    runner.go_on(step, result, quiet)
    return result


def tokens(result: StepResult) -> list[list[int]]:
    return [row.token_ids for row in result.rows]


def single_steps(
    folder: Path, lengths: list[int], params: SamplingParams, ends: list[int], num_steps: int
) -> list[list[int]]:
    """What single steps of another runner give."""
    runner, _ = load_runner(folder)
    starts = begin(runner, lengths, params, ends)
    each = [tokens(launch(runner, [start + i for start in starts], 1)) for i in range(num_steps)]
    return [[row[i][0] for row in each] for i in range(len(lengths))]


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def either_way(request: pytest.FixtureRequest, count: Count) -> Iterator[Count]:
    count.is_on = request.param
    yield count
    assert bool(count.taken) == request.param


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.usefixtures("either_way")
def test_a_launch_samples_what_single_steps_sample(
    runner: Runner, llama: Path, params: SamplingParams
) -> None:
    lengths = [4, 9, 6]
    starts = begin(runner, lengths, params)
    found = tokens(launch(runner, starts, 8))
    more = tokens(launch(runner, [start + 8 for start in starts], 3))
    assert [a + b for a, b in zip(found, more, strict=True)] == single_steps(llama, lengths, params, [], 11)
    assert runner.slots.num_tokens[:3].tolist() == [length + 12 for length in lengths]
    assert [runner.slots.sampling[i].num_tokens for i in range(3)] == [length + 12 for length in lengths]


@pytest.mark.usefixtures("either_way")
def test_a_launch_ends_behind_an_end_token(runner: Runner, llama: Path) -> None:
    whole = tokens(launch(runner, begin(runner, [4, 9], GREEDY), 8))
    end = whole[1][3]
    assert end not in whole[0][:4] + whole[1][:3], "another seed of the weights is wanted"
    other, _ = load_runner(llama)
    starts = begin(other, [4, 9], GREEDY, [end])
    assert tokens(launch(other, starts, 8)) == [row[:4] for row in whole]


def test_end_tokens_that_are_held_back(runner: Runner, llama: Path, either_way: Count) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=5, presence_penalty=0.1)
    whole = tokens(launch(runner, begin(runner, [4, 9], params), 8))
    ends = [whole[0][0], whole[1][2], whole[0][6]]  # and one beyond the vocabulary
    other, _ = load_runner(llama)
    found = tokens(launch(other, begin(other, [4, 9], params, [*ends, VOCAB_SIZE + 3]), 8))
    assert not {token_id for row in found for token_id in row[:4]} & set(ends)
    either_way.is_on = False
    assert found == single_steps(llama, [4, 9], params, [*ends, VOCAB_SIZE + 3], len(found[0]))


@pytest.mark.usefixtures("either_way")
def test_a_launch_ends_when_the_core_wants_something(runner: Runner) -> None:
    starts = begin(runner, [4, 9], GREEDY)
    quiet = [True]
    asked = Quiet(lambda: quiet[0], [])
    assert [len(row) for row in tokens(launch(runner, starts, 5, asked))] == [5, 5]
    quiet[0] = False
    assert [len(row) for row in tokens(launch(runner, [9, 14], 5, asked))] == [1, 1]


@pytest.mark.parametrize("place", [0, 1])
def test_a_descriptor_ends_a_compiled_launch(runner: Runner, count: Count, place: int) -> None:
    descriptors = [os.eventfd(0), os.eventfd(0)]
    try:
        starts = begin(runner, [4], GREEDY)
        assert len(tokens(launch(runner, starts, 5, Quiet(lambda: True, descriptors)))[0]) == 5
        os.eventfd_write(descriptors[place], 1)
        assert len(tokens(launch(runner, [9], 5, Quiet(lambda: True, descriptors)))[0]) == 1
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert count.taken == 2


def test_rows_that_fail_later_keep_what_they_have(llama: Path, either_way: Count) -> None:
    """A token's embedding is not a number: the step that runs it has no result, and the next plan the error."""
    runner, _ = load_runner(llama)
    whole = tokens(launch(runner, begin(runner, [4, 9], GREEDY), 6))
    poison = whole[1][2]
    assert poison not in whole[0] + whole[1][:2], "another seed of the weights is wanted"
    broken, _ = load_runner(llama)
    starts = begin(broken, [4, 9], GREEDY)
    words: Any = broken.model.model.base.words
    with torch.inference_mode():
        words.weight[poison] = float("nan")
    found = launch(broken, starts, 6)
    assert found.rows[1].token_ids == whole[1][:3] and found.rows[1].error is None
    kept = len(found.rows[0].token_ids)
    assert found.rows[0].token_ids == whole[0][:kept] and kept in (3, 4)
    after = launch(broken, [4 + kept, 12], 6)
    assert after.rows[1].error is not None and "cannot be sampled" in after.rows[1].error
    assert after.rows[0].token_ids == whole[0][kept : kept + 1]


@pytest.mark.parametrize("name", STATES)
def test_states_change_once_where_another_row_fails(name: str, count: Count, tmp_path: Path) -> None:
    """Its token's embedding is not a number: the step has run, and the rest of it goes the other way."""
    folder, prompts = SERVED[name].write(tmp_path), make_prompts(VOCAB_SIZE, [4, 9])
    whole = Driver(load_runner(folder)[0]).generate(prompts, 8)
    others = {*prompts[0], *prompts[1], *whole[0]}
    place = next(i for i in range(1, 7) if whole[1][i] not in others.union(whole[1][:i]))
    poison, broken = whole[1][place], count.load(folder)
    with torch.inference_mode():
        broken.model.model.base.words.weight[poison] = float("nan")
    first, second = Driver(broken).run(prompts, 8)
    assert first.output == whole[0] and not first.errors
    assert second.output[: place + 1] == whole[1][: place + 1]
    assert "cannot be sampled" in second.errors[0] and count.taken > place


def test_the_memory_for_rows_follows_their_number(runner: Runner, count: Count) -> None:
    prompts = make_prompts(VOCAB_SIZE, [3, 4, 5, 6, 7, 8, 9])
    assert Driver(runner, budget=64).generate(prompts, 5) == [
        Driver(runner).generate([prompt], 5)[0] for prompt in prompts
    ]
    assert count.taken >= 4 * 8


def test_memory_that_is_given_back_is_not_held(runner: Runner, count: Count) -> None:
    prompts = make_prompts(VOCAB_SIZE, [3, 9])
    before = Driver(runner).generate(prompts, 4)
    held = [weakref.ref(cache) for cache in runner.caches]
    runner.free()
    assert all(cache() is None for cache in held)
    runner.allocate_kv()
    assert Driver(runner).generate(prompts, 4) == before and count.taken == 6


def test_a_launch_that_would_grow_too_long_is_an_error(runner: Runner, count: Count) -> None:
    starts = begin(runner, [4], GREEDY)
    with pytest.raises(ValueError, match="70 steps from 4 on for at most 65 tokens"):
        launch(runner, starts, 70)
