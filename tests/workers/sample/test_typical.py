"""Typical acceptance against its formula in plain PyTorch, in float64."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.ipc.speculative import MAX_ALPHA, SpeculativeConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.kernels.data.drawing import ONE
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.sampler import SamplingSlot, sample
from pagewire.workers.sample.typical import Candidate, TypicalAcceptance

VOCAB = 96
ANY = TypicalAcceptance(0.0, 0.0)
CERTAIN = TypicalAcceptance(1.0, MAX_ALPHA)


def slot_of(params: SamplingParams, seed: int = 0, history: list[int] | None = None) -> SamplingSlot:
    """The state of a sequence whose prompt is token 1."""
    tokens = np.array([1, *(history or [])])
    return SamplingSlot(params, seed, [], tokens, 1, len(tokens), VOCAB)


def distribution(x: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What a token is drawn from: float64 [V]. x: logits [V] without ties."""
    p = (x.double() / params.temperature).softmax(0)
    p[p < max(params.min_p, math.exp(-30)) * p.max()] = 0  # below that a token is never drawn
    order = p.argsort(descending=True)
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    before = p[order].cumsum(0) - p[order]
    p[order[before >= params.top_p * p.sum()]] = 0
    return p / p.sum()


def limit(p: torch.Tensor, rule: TypicalAcceptance) -> float:
    """The least probability of a draft that counts."""
    entropy = -torch.special.xlogy(p, p).sum()
    return min(rule.threshold, rule.alpha * float(torch.exp(-entropy)))


def random_params(random: Random) -> SamplingParams:
    return SamplingParams(
        temperature=random.choice([0.3, 1.0, 2.0]),
        top_k=random.choice([0, 0, 2, 10]),
        top_p=random.choice([1.0, 1.0, 0.8]),
        min_p=random.choice([0.0, 0.0, 0.05]),
        logprobs=2,
    )


def test_what_is_accepted_is_what_the_formula_says() -> None:
    random, generator = Random(0), torch.Generator().manual_seed(0)
    count = 400
    logits = torch.randn(count, VOCAB, generator=generator)
    logits *= torch.tensor([random.choice([1.0, 3.0, 8.0]) for _ in range(count)])[:, None]
    slots = [slot_of(random_params(random), seed) for seed in range(count)]
    rules = [
        TypicalAcceptance(
            random.choice([0.0, 0.02, 0.09, 0.5, 1.0]), random.choice([0.0, 0.1, 0.3, 1.0, 1e6])
        )
        for _ in range(count)
    ]
    drawn = sample(logits, slots)
    drafts = [
        random.choice([token_id, random.randrange(VOCAB), int(row.topk(3).indices[random.randrange(3)])])
        for row, token_id in zip(logits, drawn.token_ids, strict=True)
    ]
    ahead = [
        slot.ahead([], Candidate(draft, rule)) for slot, draft, rule in zip(slots, drafts, rules, strict=True)
    ]
    outputs = sample(logits, ahead)
    num_accepted = num_refused = 0
    for row, (slot, rule, draft) in enumerate(zip(slots, rules, drafts, strict=True)):
        p = distribution(logits[row], slot.params)
        wanted = draft if p[draft] > 0 and p[draft] >= limit(p, rule) else drawn.token_ids[row]
        assert outputs.token_ids[row] == wanted, (row, p[draft], limit(p, rule))
        num_accepted += wanted == draft != drawn.token_ids[row]
        num_refused += wanted != draft
        # Log probabilities and ranks are those of the token that was taken, under the raw logits.
        logprobs = outputs.logprobs[row]
        assert logprobs.token_ids.tolist()[0] == wanted
        raw = logits[row].double().log_softmax(0)
        assert logprobs.logprobs.tolist()[0] == pytest.approx(float(raw[wanted]), abs=1e-5)
        assert logprobs.ranks.tolist() == [1 + int((raw > raw[wanted]).sum())]
        alone = sample(logits[row : row + 1], ahead[row : row + 1])
        assert alone.token_ids[0] == wanted and alone.logprobs[0] == logprobs
    assert num_accepted > 80 < num_refused


@pytest.mark.parametrize("top_k", [0, 2, 50])
def test_thresholds_of_0_accept_all_that_is_possible(top_k: int) -> None:
    """And the largest accept nothing but the drawn token, and what is certain."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    slot = slot_of(SamplingParams(temperature=1.0, top_k=top_k), seed=5)
    possible = set(logits[0].topk(top_k or VOCAB).indices.tolist())
    [drawn] = sample(logits, [slot]).token_ids
    for draft in range(-1, VOCAB + 2):
        [token_id] = sample(logits, [slot.ahead([], Candidate(draft, ANY))]).token_ids
        assert token_id == (draft if draft in possible else drawn)
        assert sample(logits, [slot.ahead([], Candidate(draft, CERTAIN))]).token_ids == [drawn]
    only = slot_of(SamplingParams(temperature=1.0, top_k=1))
    [best] = sample(logits, [only.ahead([], Candidate(drawn, CERTAIN))]).token_ids
    assert best == int(logits.argmax())


def test_greedy_tokens_do_not_depend_on_drafts() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    for params in (
        {},
        {"presence_penalty": 1.5, "repetition_penalty": 1.1},
        {"allowed_token_ids": [3, 4, 5]},
    ):
        slot = slot_of(SamplingParams(temperature=0.0, **params), history=[4, 5])  # type: ignore[arg-type]
        wanted = sample(logits, [slot])
        for draft in range(VOCAB):
            assert sample(logits, [slot.ahead([], Candidate(draft, ANY))]) == wanted


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [5, 6]},
        {"bad_words_token_ids": [[7], [2, 8]]},
        {"logit_bias": {9: -100.0}},
    ],
    ids=str,
)
def test_what_a_request_rules_out_is_never_accepted(params: dict[str, Any]) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    slot = slot_of(SamplingParams(temperature=1.0, **params), history=[2])
    excluded = {
        "allowed_token_ids": set(range(VOCAB)) - {5, 6},
        "bad_words_token_ids": {7, 8},
        "logit_bias": {9},
    }[next(iter(params))]
    [drawn] = sample(logits, [slot]).token_ids
    for draft in range(VOCAB):
        [token_id] = sample(logits, [slot.ahead([], Candidate(draft, ANY))]).token_ids
        assert token_id == (drawn if draft in excluded else draft)


def test_a_draft_that_the_grammar_forbids_is_never_accepted() -> None:
    logits = torch.zeros(2, VOCAB)
    bits = torch.tensor([[0b1010, 0, 0]], dtype=torch.int32)
    slot = slot_of(SamplingParams(temperature=1.0))
    for draft in range(6):
        slots = [slot.ahead([], Candidate(draft, ANY))] * 2
        free, masked = sample(logits, slots, TokenMasks({1: 0}, bits)).token_ids
        assert free == draft
        assert masked == draft if draft in (1, 3) else masked in (1, 3)


def test_the_thresholds_are_those_of_the_configuration() -> None:
    typical = SpeculativeConfig("ngram", acceptance_method="typical_acceptance_sampler")
    assert TypicalAcceptance.of(None) is TypicalAcceptance.of(SpeculativeConfig("ngram")) is None
    rule = TypicalAcceptance.of(typical)
    assert rule == TypicalAcceptance(0.09, 0.3)
    # By hand: a token of probability 0.09 counts at low entropy, at an entropy of 3 nats 0.3 * exp(-3) will do.
    assert accepts(rule, 0.0901, 0.5) and not accepts(rule, 0.0899, 0.5)
    assert accepts(rule, 0.3 * math.exp(-2.9999), 3.0) and not accepts(rule, 0.0149, 3.0)
    assert not accepts(TypicalAcceptance(0.0, 0.0), 0.0, 3.0)


def accepts(rule: TypicalAcceptance, probability: float, entropy: float) -> bool:
    """Of masses whose mean depth is a fifth of the entropy: the other four are the logarithm of their sum."""
    total = ONE * math.exp(0.8 * entropy)
    return rule.accepts(int(probability * total), int(total), int(ONE * math.exp(-0.2 * entropy)))


def test_the_state_ahead_is_a_copy() -> None:
    slot = slot_of(SamplingParams(temperature=1.0, presence_penalty=1.0))
    ahead = slot.ahead([3, 4], Candidate(5, ANY))
    assert slot.candidate is None and slot.num_tokens == 1 and ahead.num_tokens == 3
    assert slot.ahead([]) is slot and ahead.ahead([3]).candidate is None
    assert slot.edits.counts is not None and len(slot.edits.counts.ids) == 0
