"""Drafters on a GPU, emulated or real, where steps are launched ahead and recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.ipc.speculative import TYPICAL, SpeculativeConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import VOCAB_SIZE
from tests.workers.device.conftest import llama, load  # noqa: F401 - fixtures
from tests.workers.driver import GREEDY, Driver, tokens_of, values
from tests.workers.parity import make_prompts
from tests.workers.speculation.speculating import SpeculativeDriver

NUM_TOKENS = 7


def test_drafts_of_a_copy_of_the_model_count(llama: Path, load: Callable[..., Runner]) -> None:  # noqa: F811
    prompts, params = make_prompts(VOCAB_SIZE, [15, 4]), SamplingParams(temperature=0.8, top_k=40)
    plain = Driver(load()).generate(prompts, NUM_TOKENS, params)
    driver = SpeculativeDriver(
        load(speculative=SpeculativeConfig("draft_model", str(llama), 3)), wanted=lambda *_: 3
    )
    sequences = [driver.add(i, prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    driver.run(sequences, NUM_TOKENS)
    assert [s.output[:NUM_TOKENS] for s in sequences] == plain
    assert sum(s.num_accepted for s in sequences) >= 6


def test_typical_drafts_count(load: Callable[..., Runner]) -> None:  # noqa: F811
    """All that are possible, with a threshold of 0; greedy rows beside them take none."""
    drafts, blocks = [3, 40, 5], [[0, 1], [2, 3]]
    prompts = make_prompts(VOCAB_SIZE, [9, 9])
    both = [SamplingParams(temperature=1.0, logprobs=0), GREEDY]
    typical = SpeculativeConfig("ngram", None, 3, acceptance_method=TYPICAL, posterior_threshold=0.0)
    runner = load(speculative=typical)
    inits = [SlotInit(i, prompts[i], 9, blocks[i], both[i], seed=i) for i in range(2)]
    first = tokens_of(runner.step(StepPlan(0, [Row(i, 0, 9, num_samples=1) for i in range(2)], inits)))
    rows = [Row(0, 9, 4, [], drafts, num_samples=4), Row(1, 9, 2, [], [drafts[0]], num_samples=2)]
    result, greedy = runner.step(StepPlan(1, rows)).rows
    assert result.token_ids[:3] == drafts and len(result.token_ids) == 4
    last = runner.step(StepPlan(2, [Row(0, 13, 1, num_samples=1)], freed_slots=[1])).rows[0]

    plain = Driver(load())
    assert plain.generate(prompts[1:], 2, [GREEDY])[0] == [first[1], *greedy.token_ids]
    whole = [*prompts[0], first[0], *result.token_ids, *last.token_ids]
    [request] = plain.run([whole], 1, SamplingParams(temperature=0.0, prompt_logprobs=0))
    expected = [each for part in request.prompt_logprobs for each in values(part)[1]]
    assert result.logprobs is not None and last.logprobs is not None
    found = values(result.logprobs)[1] + values(last.logprobs)[1]
    assert found == pytest.approx(expected[-5:], abs=0.05)
