"""Beam search beside that of transformers, on the demo model in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import pagewire.demo
from pagewire import LLM, BeamSearchParams

FOLDER = Path(pagewire.demo.__path__[0])
PROMPTS = ["The with statement", "A generator function"]
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def model() -> Any:
    """The oracle."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def expected(model: Any, prompt: list[int], width: int, ends: list[int], **options: Any) -> list[Any]:
    """(tokens, score) of the beams of transformers, best first."""
    output = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    beams = []
    for row, score in zip(
        output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist(), strict=True
    ):
        end = next((place for place, token_id in enumerate(row) if token_id in ends), len(row) - 1)
        beams.append((row[: end + 1], score))
    return beams


def frequent(llm: LLM, prompt: list[int]) -> list[int]:
    """Two tokens that come early in likely continuations: as ends of sequence, beams end at all lengths."""
    beams = llm.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(4, NUM_TOKENS, ignore_eos=True))
    tokens = [token_id for beam in beams[0].sequences for token_id in beam.token_ids[2:6]]
    return sorted(set(tokens), key=lambda token_id: (-tokens.count(token_id), token_id))[:2]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 0.5, -1.0])
def test_beams_are_those_of_transformers(
    llm: LLM, model: Any, early_stopping: Any, length_penalty: float
) -> None:
    """With several end-of-sequence tokens, at which beams of different lengths end."""
    lengths = set()
    for prompt in (llm.get_tokenizer().encode(text) for text in PROMPTS):
        ends = frequent(llm, prompt)
        for width in (2, 4):
            params = BeamSearchParams(
                beam_width=width,
                max_tokens=NUM_TOKENS,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                ignore_eos=True,
                stop_token_ids=ends,
            )
            beams = llm.beam_search([{"prompt_token_ids": prompt}], params)[0].sequences
            options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
            oracle = expected(model, prompt, width, ends, **options)
            assert [beam.token_ids for beam in beams] == [tokens for tokens, _ in oracle]
            scores = [beam.score(length_penalty) for beam in beams]
            assert scores == pytest.approx([score for _, score in oracle], abs=1e-4)
            lengths |= {len(beam.token_ids) for beam in beams}
    assert len(lengths) > 2


def test_min_tokens_as_in_transformers(llm: LLM, model: Any) -> None:
    for prompt in (llm.get_tokenizer().encode(text) for text in PROMPTS):
        ends = frequent(llm, prompt)
        params = BeamSearchParams(3, NUM_TOKENS, ignore_eos=True, stop_token_ids=ends, min_tokens=5)
        beams = llm.beam_search([{"prompt_token_ids": prompt}], params)[0].sequences
        oracle = expected(model, prompt, 3, ends, min_new_tokens=5, length_penalty=1.0)
        assert [beam.token_ids for beam in beams] == [tokens for tokens, _ in oracle]
        assert all(len(beam.token_ids) > 5 for beam in beams)


def test_texts_of_beams(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    eos = tokenizer.eos_token_id
    prompt = {"prompt_token_ids": tokenizer.encode("The with statement"), "cache_salt": "s"}
    params = BeamSearchParams(4, NUM_TOKENS, include_stop_str_in_output=True)
    beams = llm.beam_search([prompt], params)[0].sequences
    assert all(beam.tokens == prompt["prompt_token_ids"] + beam.token_ids for beam in beams)
    for beam in beams:
        assert (beam.finish_reason == "stop") == (beam.token_ids[-1] == eos)
        assert beam.text == tokenizer.decode(beam.token_ids, skip_special_tokens=False)
