"""Typical acceptance in the worker: more drafts count, and each token is one that its rule allows.

The oracle is transformers in float32: every token that was returned is drawn or accepted again, from the oracle's
logits behind the tokens before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.engine_core.tenants.accounts import Account, Accounts
from pagewire.engine_core.tenants.waiting import WaitingQueue
from pagewire.ipc.speculative import TYPICAL, SpeculativeConfig
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Request
from pagewire.ipc.wire.params import SamplingParams
from pagewire.workers.run.runner import Runner
from pagewire.workers.sample.sampler import SamplingSlot, sample
from pagewire.workers.sample.typical import Candidate, TypicalAcceptance
from tests.workers.architectures import VOCAB_SIZE
from tests.workers.conftest import LLAMA
from tests.workers.driver import load_runner
from tests.workers.parity import make_prompts
from tests.workers.speculation.speculating import SpeculativeDriver
from tests.workers.test_drafts import (
    EOS,
    MAX_MODEL_LEN,
    PARAMS,
    REGEX,
    WAYS,
    Adversary,
    Output,
    Way,
    generate,
    requests,
    run,
)

RULE = TypicalAcceptance(0.01, 0.1)
FIELDS: dict[str, Any] = {"acceptance_method": TYPICAL, "posterior_threshold": 0.01, "posterior_alpha": 0.1}
NGRAM = SpeculativeConfig("ngram", None, 5, **FIELDS)
BY_NAME = {way.name: way for way in WAYS}
POSSIBLE = [10, 11, 12, 13, 14, 15, EOS]


class Few(Adversary):
    """Proposes tokens that the requests allow, in an order that follows nothing."""

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        self._next += 1
        return [POSSIBLE[(self._next * 3 + i * i) % len(POSSIBLE)] for i in range(min(limit, 5))]


@pytest.fixture(scope="module")
def typical(llama: Path) -> Runner:
    """A runner that accepts typical drafts."""
    return load_runner(llama, max_num_seqs=32, num_blocks=320, speculative=NGRAM)[0]


@pytest.fixture(scope="module")
def oracle(llama: Path) -> Callable[[list[int]], torch.Tensor]:
    """The logits [T, V] behind each of some tokens, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(token_ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return found

    return logits


def check(sequence: Sequence, output: Output, logits: torch.Tensor) -> int:
    """Check each token against the logits behind the one before it; returns how many were not drawn."""
    params, num_prompt_tokens = sequence.params, sequence.num_prompt_tokens
    token_ids = np.array([*sequence.token_ids[:num_prompt_tokens], *output.tokens])
    stop_ids = [*(params.stop_token_ids or []), *([] if params.ignore_eos else [EOS])]
    num_accepted = 0
    for i, token_id in enumerate(output.tokens):
        place = num_prompt_tokens + i
        here = logits[place - 1 : place]
        slot = SamplingSlot(params, sequence.seed, stop_ids, token_ids, num_prompt_tokens, place, VOCAB_SIZE)
        if params.structured_outputs is None:
            drawn = sample(here, [slot]).token_ids
            assert sample(here, [slot.ahead([], Candidate(token_id, RULE))]).token_ids == [token_id], i
            num_accepted += drawn != [token_id]
        if params.logprobs is not None:
            check_logprobs(output.logprobs[i], token_id, here[0].double().log_softmax(0))
    return num_accepted


def check_logprobs(position: Any, token_id: int, expected: torch.Tensor) -> None:
    """position: the bytes of ids, log probabilities and rank. expected: of all tokens [V]."""
    ids, logprobs, rank = (
        np.frombuffer(data, dtype) for data, dtype in zip(position, ("i4", "f4", "i4"), strict=True)
    )
    assert ids[0] == token_id
    np.testing.assert_allclose(logprobs, expected[torch.from_numpy(ids.copy())], atol=1e-4)
    margin = 1e-4 * torch.tensor([1, -1])
    least, most = (1 + int((expected > expected[token_id] + each).sum()) for each in margin)
    assert least <= rank[0] <= most


@pytest.mark.parametrize("way", ["a batch", "preempted"])
def test_each_token_is_drawn_or_typical_with_the_log_probabilities_of_itself(
    typical: Runner, oracle: Callable[[list[int]], torch.Tensor], way: str
) -> None:
    """With penalties, bad words, stop tokens, n and so on: what was accepted is in the counts of what follows."""
    how: Way = BY_NAME[way]
    outputs = generate(typical, how, Few())
    num_accepted, num_matches = 0, 0
    for request in (each for group in requests(how) for each in group):
        name = list(PARAMS)[request.key % len(PARAMS)]
        for sequence in made(request):
            output = outputs[sequence.key, sequence.index]
            assert len(output.tokens) <= sequence.max_output
            count = check(sequence, output, oracle([*sequence.token_ids, *output.tokens]))
            if sequence.params.temperature == 0:
                assert not count, name
            if sequence.params.structured_outputs is not None and output.end == ("stop", None, None):
                text = "".join(chr(ord("a") + i - 10) for i in output.tokens if i != EOS)
                assert re.fullmatch(REGEX, text), name
                num_matches += 1
            num_accepted += count
    assert num_accepted > 20 and num_matches


def made(request: Request) -> list[Sequence]:
    return sequences(
        request, b"test", 0, 0.0, max_model_len=MAX_MODEL_LEN, share_prefixes=True, tenant=Account(b"test")
    )


def test_what_was_given_stays_when_the_worker_is_lost(
    typical: Runner, oracle: Callable[[list[int]], torch.Tensor]
) -> None:
    """No token is lost or doubled; those that follow continue those that were given."""
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, presence_penalty=0.5, logprobs=1)
    prompts = make_prompts(VOCAB_SIZE, [9, 4, 13])
    submitted = [
        made(Request(key, str(key), Prompt(prompt), params, seed=key))[0]
        for key, prompt in enumerate(prompts)
    ]
    scheduler = Scheduler(
        SchedulerConfig(320, 4, MAX_MODEL_LEN, 32, 64, "fcfs", 2),
        WaitingQueue("fcfs", Accounts(1 << 30)),
        Few(),
    )
    outputs = {(sequence.key, 0): Output() for sequence in submitted}
    for sequence in submitted:
        scheduler.add(sequence)
    for _ in range(4):
        plan = scheduler.plan(0.0)
        assert plan is not None
        for sequence, delta in scheduler.commit(typical.step(plan), 0.0):
            outputs[sequence.key, 0].add(delta)
    given = {key: list(output.tokens) for key, output in outputs.items()}
    assert all(given.values()) and scheduler.plan(0.0) is not None  # which the worker never answers
    assert not scheduler.fail(0.0)
    typical.slots.clear()
    run(typical, scheduler, outputs)
    num_accepted = 0
    for sequence, prompt in zip(submitted, prompts, strict=True):
        output = outputs[sequence.key, 0]
        assert output.tokens[: len(given[sequence.key, 0])] == given[sequence.key, 0]
        assert len(output.tokens) == len(output.logprobs) == 24 and sequence.output_token_ids == output.tokens
        num_accepted += check(sequence, output, oracle([*prompt, *output.tokens]))
    assert num_accepted > 5


def test_more_drafts_of_a_draft_model_count(llama: Path, tmp_path: Path) -> None:
    """Of another random model, at temperature 1; and at temperature 0 as many, with the same tokens."""
    drafter = LLAMA.write(tmp_path, seed=1)
    prompts = make_prompts(VOCAB_SIZE, [12, 5, 9])
    counts, greedy = [], []
    for fields in ({}, {"acceptance_method": TYPICAL}):
        config = SpeculativeConfig("draft_model", str(drafter), 4, **fields)  # type: ignore[arg-type]
        runner = load_runner(llama, speculative=config)[0]
        for temperature in (1.0, 0.0):
            params = SamplingParams(temperature=temperature)
            driver = SpeculativeDriver(runner, wanted=lambda *_: 4)
            running = [driver.add(i, prompt, params, seed=i) for i, prompt in enumerate(prompts)]
            driver.run(running, 24)
            (counts if temperature else greedy).append(
                sum(s.num_accepted for s in running) / driver.num_steps
            )
            if not temperature:
                greedy.append([s.output[:24] for s in running])
            for sequence in running:
                driver.end(sequence)
            driver.step([])
    assert greedy[:2] == greedy[2:]
    assert counts[1] > counts[0] + 1
