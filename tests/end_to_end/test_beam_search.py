"""Beam search beside that of transformers, on the demo model in float32."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import pagewire.demo
from pagewire import LLM, AsyncLLM, BeamSearchParams, SamplingParams

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
        eos_token_id=ends or None,
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


EDITS: dict[str, Any] = {
    "repetition_penalty": 1.6,
    "frequency_penalty": 0.7,
    "presence_penalty": -0.4,
    "logit_bias": {30: 2.0},
}


def penalise(model: Any, num_prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the oracle return logits after `EDITS`, which follow from all tokens: so it must not cache any."""
    forward = model.forward

    def edited(input_ids: torch.Tensor, **options: Any) -> Any:
        output = forward(input_ids=input_ids, **options)
        x = output.logits[:, -1]
        x[:, 30] += EDITS["logit_bias"][30]
        for row, tokens in zip(x, input_ids, strict=True):
            seen = tokens.unique()
            row[seen] = torch.where(
                row[seen] < 0,
                row[seen] * EDITS["repetition_penalty"],
                row[seen] / EDITS["repetition_penalty"],
            )
            own, times = tokens[num_prompt:].unique(return_counts=True)
            row[own] -= EDITS["frequency_penalty"] * times + EDITS["presence_penalty"]
        return output

    monkeypatch.setattr(model, "forward", edited)


def test_penalties_change_the_logits_of_beams(llm: LLM, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has the n best of `best_of` beams: those of transformers' search on edited logits."""
    params = SamplingParams(
        n=3,
        best_of=4,
        use_beam_search=True,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        length_penalty=0.5,
        **EDITS,
    )
    prompts = [llm.get_tokenizer().encode(text) for text in PROMPTS]
    mixed = [params, SamplingParams(temperature=0.0, max_tokens=3), params]
    found = llm.generate([prompts[0], prompts[0], prompts[1]], mixed, use_tqdm=False)
    assert len(found[1].outputs) == 1 and len(found[1].outputs[0].token_ids) == 3
    for prompt, output in zip(prompts, [found[0], found[2]], strict=True):
        with monkeypatch.context() as patch:
            penalise(model, len(prompt), patch)
            oracle = expected(model, prompt, 4, [], length_penalty=0.5, use_cache=False)
        assert output.finished and output.prompt_token_ids == prompt
        assert [list(part.token_ids) for part in output.outputs] == [tokens for tokens, _ in oracle[:3]]
        for part, (_, score) in zip(output.outputs, oracle, strict=False):
            assert part.cumulative_logprob == pytest.approx(score * NUM_TOKENS**0.5, abs=1e-3)
            assert part.text == llm.get_tokenizer().decode(part.token_ids, skip_special_tokens=True)
            assert part.finish_reason == "length" and part.logprobs is None


def test_searches_step_by_step_and_in_an_event_loop(llm: LLM, address: str) -> None:
    """`LLMEngine` and `AsyncLLM` give what `LLM` gives, beside other requests."""
    params = SamplingParams(n=2, use_beam_search=True, max_tokens=6, length_penalty=0.0, early_stopping=True)
    whole = [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    engine = llm.llm_engine
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"beams-{index}", prompt, params)
    engine.add_request("plain", PROMPTS[0], SamplingParams(max_tokens=4))
    engine.add_request("gone", PROMPTS[0], params)
    with pytest.raises(ValueError, match="'gone' is in use"):
        engine.add_request("gone", PROMPTS[0], params)
    engine.abort_request("gone")
    assert engine.get_num_unfinished_requests() == 3
    finals = {}
    while engine.has_unfinished_requests():
        finals.update({output.request_id: output for output in engine.step() if output.finished})
    assert [finals[f"beams-{index}"].outputs for index in range(2)] == whole
    assert finals.keys() == {"beams-0", "beams-1", "plain"}

    async def generate() -> list[Any]:
        async with AsyncLLM.attach(address) as attached:
            return [output async for output in attached.generate(PROMPTS[1], params, "mine")]

    (output,) = asyncio.run(generate())
    assert (output.outputs, output.request_id, output.prompt) == (whole[1], "mine", PROMPTS[1])


def test_a_wide_search_at_a_temperature_needs_no_option(address: str, llm: LLM) -> None:
    params = BeamSearchParams(40, 2, ignore_eos=True, temperature=0.5)
    with LLM.attach(address) as attached:
        assert attached.info.max_logprobs == 20
        beams = attached.beam_search(PROMPTS[:1], params)[0].sequences
    assert len(beams) == 40
    output = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1, logprobs=40), use_tqdm=False)[0].outputs[
        0
    ]
    first = {token_id: entry.logprob / 0.5 for token_id, entry in output.logprobs[0].items()}
    total = math.log(math.fsum(map(math.exp, first.values())))  # of nearly all of the probability
    step = BeamSearchParams(40, 1, ignore_eos=True, temperature=0.5)
    for beam in llm.beam_search(PROMPTS[:1], step)[0].sequences[:10]:
        assert beam.cumulative_logprob == pytest.approx(first[beam.token_ids[0]] - total, abs=0.01)


def test_the_best_of_several_samples(llm: LLM) -> None:
    """By log probability per token, and in the order of it."""
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 12, "logprobs": 0}
    every = llm.generate(PROMPTS[:1], SamplingParams(n=5, **fields), use_tqdm=False)[0].outputs
    del fields["logprobs"]
    best = llm.generate(PROMPTS[:1], SamplingParams(n=2, best_of=5, **fields), use_tqdm=False)[0].outputs
    ranked = sorted(every, key=lambda part: -part.cumulative_logprob / len(part.token_ids))
    assert [part.token_ids for part in best] == [part.token_ids for part in ranked[:2]]
    assert [part.index for part in best] == [0, 1]


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
