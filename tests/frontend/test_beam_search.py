"""Beam search against exhaustive search over a toy model, and against Hugging Face's."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from pagewire.frontend.beam_search import Beams, BeamSearchSequence, beam_search
from pagewire.ipc.params import BeamSearchParams, SamplingParams

EOS = 0
VOCAB = 5


def distribution(tokens: tuple[int, ...]) -> list[float]:
    """Log probabilities of the next token: arbitrary, but fixed for each context."""
    weights = [
        1 + (7 * sum((i + 1) * t for i, t in enumerate(tokens)) + 5 * v * v + 3 * v) % 11
        for v in range(VOCAB)
    ]
    return [math.log(weight / sum(weights)) for weight in weights]


class Model:
    """Answers as the engine does: the `logprobs` most likely tokens of each prompt's next position."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def extend(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        self.batches.append(len(prompts))
        assert params.max_tokens == 1 and params.logprobs is not None
        outputs = []
        for prompt in prompts:
            ranked = sorted(enumerate(distribution(tuple(prompt))), key=lambda pair: -pair[1])
            top = ranked if params.logprobs == -1 else ranked[: params.logprobs]
            entries = {token: SimpleNamespace(logprob=logprob) for token, logprob in top}
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(logprobs=[entries])]))
        return outputs


def search(prompt: list[int], **options: Any) -> list[BeamSearchSequence]:
    params = BeamSearchParams(**options)
    results = beam_search([prompt], params, Model().extend, eos_token_id=EOS, max_model_len=100)
    return results[0]


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
        [1, 2], beam_width=width, max_tokens=4, length_penalty=length_penalty, ignore_eos=ignore_eos
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


def test_stopping_early_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [([p], w, penalty) for p in range(1, 5) for w in (1, 2, 3) for penalty in (0.0, 1.0, -0.5)]

    def run() -> list[list[list[int]]]:
        return [
            [b.token_ids for b in search(p, beam_width=w, max_tokens=12, length_penalty=penalty)]
            for p, w, penalty in cases
        ]

    early = run()
    monkeypatch.setattr(Beams, "_settled", lambda self: False)
    assert early == run()


def test_prompts_are_one_batch_and_the_model_length_is_kept() -> None:
    model = Model()
    done: list[int] = []
    results = beam_search(
        [[1], [1, 2, 3]],
        BeamSearchParams(beam_width=2, max_tokens=10, ignore_eos=True),
        model.extend,
        eos_token_id=EOS,
        max_model_len=5,
        on_done=lambda: done.append(1),
    )
    assert model.batches == [2, 4, 2, 2]
    assert [[len(beam.tokens) for beam in beams] for beams in results] == [[5, 5], [5, 5]]
    assert len(done) == 2


def test_temperature_reshapes_the_scores() -> None:
    def scaled(tokens: tuple[int, ...], temperature: float) -> list[float]:
        weights = [math.exp(logprob / temperature) for logprob in distribution(tokens)]
        return [math.log(weight / sum(weights)) for weight in weights]

    (beam,) = search([3], beam_width=1, max_tokens=2, temperature=0.5, ignore_eos=True)
    first, second = beam.token_ids
    assert beam.cumulative_logprob == pytest.approx(
        scaled((3,), 0.5)[first] + scaled((3, first), 0.5)[second]
    )
