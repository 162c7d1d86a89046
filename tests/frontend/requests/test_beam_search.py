"""Beam search against exhaustive search over a toy model."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from pagewire.frontend.requests.beam_search import (
    Beams,
    BeamSearchSequence,
    beam_search,
    end_tokens,
    tokens_prompt,
)
from pagewire.frontend.text.prompts import TokensPrompt
from pagewire.ipc.wire.params import BeamSearchParams, SamplingParams

EOS = 0
VOCAB = 5


def distribution(tokens: tuple[int, ...]) -> list[float]:
    """Log probabilities of the next token: arbitrary, but fixed for each context."""
    weights = [
        1 + (7 * sum((i + 1) * t for i, t in enumerate(tokens)) + 5 * v * v + 3 * v) % 11
        for v in range(VOCAB)
    ]
    return [math.log(weight / sum(weights)) for weight in weights]


def at_temperature(logprobs: list[float], temperature: float) -> list[float]:
    scaled = [max((logprob - max(logprobs)) / temperature, -1e38) for logprob in logprobs]
    norm = math.log(math.fsum(map(math.exp, scaled)))
    return [value - norm for value in scaled]


class Model:
    """Answers as the engine does: the `logprobs` most likely tokens of each prompt's next position."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.prompts: list[TokensPrompt] = []

    def extend(self, prompts: list[TokensPrompt], params: SamplingParams) -> list[Any]:
        self.batches.append(len(prompts))
        self.prompts += prompts
        assert params.logprobs is not None
        outputs = []
        for prompt in prompts:
            generated = prompt["generated_token_ids"]  # type: ignore[typeddict-item]
            assert params.max_tokens == len(generated) + 1
            logprobs = distribution((*prompt["prompt_token_ids"], *generated))
            if params.temperature:
                assert params.processed_logprobs
                logprobs = at_temperature(logprobs, params.temperature)
            ranked = sorted(enumerate(logprobs), key=lambda pair: -pair[1])
            top = ranked[: params.logprobs]
            entries = {token: SimpleNamespace(logprob=logprob) for token, logprob in top}
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(logprobs=[entries])]))
        return outputs


def search(
    prompt: list[int], model: Model | None = None, eos_token_ids: tuple[int, ...] = (EOS,), **options: Any
) -> list[BeamSearchSequence]:
    params = BeamSearchParams(**options)
    ends = end_tokens(params, eos_token_ids[0], {"eos_token_id": list(eos_token_ids)})
    (beams,) = beam_search(
        [TokensPrompt(prompt_token_ids=prompt)],
        params,
        (model or Model()).extend,
        ends=ends,
        max_model_len=100,
    )
    return beams


def exhaustive(prompt: tuple[int, ...], max_tokens: int, length_penalty: float, eos: int | None) -> list[Any]:
    """Every complete sequence with its score, best first."""
    complete = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ended = tokens[-1] == eos
            if eos in tokens[:-1] or (not ended and length < max_tokens):
                continue
            logprob = sum(distribution(prompt + tokens[:i])[tokens[i]] for i in range(length))
            complete.append((logprob / length**length_penalty, list(tokens)))
    return sorted(complete, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_wide_beam_is_exhaustive(length_penalty: float, ignore_eos: bool) -> None:
    width = VOCAB**3
    beams = search(
        [1, 2],
        beam_width=width,
        max_tokens=4,
        length_penalty=length_penalty,
        ignore_eos=ignore_eos,
        early_stopping="never",
    )
    expected = exhaustive((1, 2), 4, length_penalty, None if ignore_eos else EOS)[:width]
    assert [beam.score(length_penalty) for beam in beams] == pytest.approx([score for score, _ in expected])
    assert beams[0].token_ids == expected[0][1]


def test_beams_know_how_they_ended() -> None:
    beams = search([1], beam_width=4, max_tokens=3)
    assert len(beams) == 4
    for beam in beams:
        assert beam.finish_reason == ("stop" if beam.token_ids[-1] == EOS else "length")
        assert beam.tokens == [1, *beam.token_ids]
        assert beam.cum_logprob == beam.cumulative_logprob


CASES = [([p], w, penalty) for p in range(1, 5) for w in (1, 2, 3) for penalty in (0.0, 1.0, -0.5)]


def all_cases(**options: Any) -> tuple[list[list[list[int]]], list[int]]:
    """The beams of all cases, and the number of steps of each."""
    beams, steps = [], []
    for prompt, width, penalty in CASES:
        model = Model()
        best = search(prompt, model, beam_width=width, max_tokens=12, length_penalty=penalty, **options)
        beams.append([beam.token_ids for beam in best])
        steps.append(len(model.batches))
    return beams, steps


def test_never_stopping_early_is_stopping_when_nothing_can_change(monkeypatch: pytest.MonkeyPatch) -> None:
    beams, steps = all_cases(early_stopping="never")
    monkeypatch.setattr(Beams, "_settled", lambda self: False)
    assert (beams, [12] * len(CASES)) == all_cases(early_stopping="never")
    assert any(count < 12 for count in steps)


def test_early_stopping_is_in_the_order_of_its_values() -> None:
    _, at_once = all_cases(early_stopping=True)
    _, likely = all_cases(early_stopping=False)
    _, never = all_cases(early_stopping="never")
    assert all(a <= b <= c for a, b, c in zip(at_once, likely, never, strict=True))
    assert at_once != likely and likely != never
    assert likely == all_cases()[1]


def test_a_search_that_stops_early_has_the_first_beams_that_end() -> None:
    model = Model()
    beams = search([1], model, beam_width=2, max_tokens=12, early_stopping=True)
    assert len(beams) == 2 and all(beam.finish_reason == "stop" for beam in beams)
    assert len(model.batches) == max(len(beam.token_ids) for beam in beams)


def test_any_end_of_sequence_token_ends_a_beam() -> None:
    beams = search([1], beam_width=4, max_tokens=6, eos_token_ids=(EOS, 3), stop_token_ids=[4])
    last = {beam.token_ids[-1]: beam for beam in beams if beam.finish_reason == "stop"}
    assert {EOS, 3, 4} >= set(last) and len(last) > 1
    for token_id, beam in last.items():
        assert beam.stop_reason == (None if token_id == EOS else token_id)
        assert not {EOS, 3, 4} & set(beam.token_ids[:-1])
    only = search(
        [1],
        beam_width=8,
        max_tokens=6,
        eos_token_ids=(EOS, 3),
        ignore_eos=True,
        stop_token_ids=[4],
        length_penalty=0.5,
    )
    ended = [beam for beam in only if beam.finish_reason == "stop"]
    assert ended and all(beam.token_ids[-1] == 4 and 4 not in beam.token_ids[:-1] for beam in ended)
    assert any({EOS, 3} & set(beam.token_ids) for beam in only)


@pytest.mark.parametrize("min_tokens", [1, 3, 6])
def test_no_beam_ends_before_min_tokens(min_tokens: int) -> None:
    early = search([2], beam_width=3, max_tokens=6, length_penalty=-1.0)
    assert min(len(beam.token_ids) for beam in early) == 1
    beams = search([2], beam_width=3, max_tokens=6, length_penalty=-1.0, min_tokens=min_tokens)
    assert len(beams) == 3 and all(EOS not in beam.token_ids[:min_tokens] for beam in beams)


def test_prompts_are_one_batch_and_the_model_length_is_kept() -> None:
    model = Model()
    done: list[int] = []
    groups = beam_search(
        [TokensPrompt(prompt_token_ids=[1]), TokensPrompt(prompt_token_ids=[1, 2, 3])],
        BeamSearchParams(beam_width=2, max_tokens=10, ignore_eos=True),
        model.extend,
        ends={},
        max_model_len=5,
        on_done=lambda: done.append(1),
    )
    assert model.batches == [2, 4, 2, 2]
    assert [[len(beam.tokens) for beam in beams] for beams in groups] == [[5, 5], [5, 5]]
    assert len(done) == 2


def test_every_step_has_the_cache_salt_of_its_prompt() -> None:
    model = Model()
    prompts = [tokens_prompt({"prompt": "x", "cache_salt": "s"}, [1]), tokens_prompt("x", [2])]
    beam_search(prompts, BeamSearchParams(2, 3), model.extend, ends={}, max_model_len=100)
    salts = {prompt["prompt_token_ids"][0]: prompt.get("cache_salt") for prompt in model.prompts}
    assert salts == {1: "s", 2: None} and sum(model.batches) == len(model.prompts) == 10
    with pytest.raises(ValueError, match="cache_salt must not be empty"):
        tokens_prompt({"prompt": "x", "cache_salt": ""}, [1])


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * 5, {}, "5 tokens, which leaves room for 0 of at least 1: max_model_len is 5"),
        ([1] * 3, {"min_tokens": 3}, "3 tokens, which leaves room for 2 of at least 3"),
        ([1], {"beam_width": 1024}, "beam_width=1024 needs the log probabilities of 1025 tokens per step"),
    ],
)
def test_a_search_that_cannot_be_run_is_an_error(
    prompt: list[int], options: dict[str, Any], message: str
) -> None:
    model = Model()
    params = BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | options))
    with pytest.raises(ValueError, match=message):
        beam_search(
            [TokensPrompt(prompt_token_ids=prompt)],
            params,
            model.extend,
            ends={EOS: None},
            max_model_len=5,
            max_logprobs=4,
        )
    assert not model.batches


def test_temperature_reshapes_the_scores() -> None:
    def scaled(tokens: tuple[int, ...], temperature: float) -> list[float]:
        weights = [math.exp(logprob / temperature) for logprob in distribution(tokens)]
        return [math.log(weight / sum(weights)) for weight in weights]

    (beam,) = search([3], beam_width=1, max_tokens=2, temperature=0.5, ignore_eos=True)
    first, second = beam.token_ids
    assert beam.cumulative_logprob == pytest.approx(
        scaled((3,), 0.5)[first] + scaled((3, first), 0.5)[second]
    )


@pytest.mark.parametrize("penalty", [-16.0, 16.0])
def test_scores_are_numbers_whatever_the_length(penalty: float) -> None:
    for length in (1, 2**20, 2**63 - 1):
        for cumulative in (-1e300, -1e-300, 0.0):
            assert not math.isnan(BeamSearchSequence([1], cumulative).score(penalty, length))


@pytest.mark.parametrize("temperature", [1e-320, 1e-8, 1e300])
def test_any_temperature_gives_log_probabilities(temperature: float) -> None:
    beams = search([1], beam_width=3, max_tokens=4, temperature=temperature)
    assert len(beams) == 3
    assert all(beam.cumulative_logprob <= 0.0 for beam in beams)  # and not nan
