"""`LLM` on a real engine, with transformers on the same weights as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import pagewire.demo
from pagewire import LLM, BeamSearchParams, SamplingParams

FOLDER = Path(pagewire.demo.__path__[0])
PROMPTS = ["The with statement", "A generator function", "class Foo:\n    def", "An", "import re\n" * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def oracle() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(FOLDER), model


def greedy(oracle: tuple[Any, Any], prompt: list[int], count: int) -> list[int]:
    _, model = oracle
    output = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def test_greedy_tokens_and_text_are_those_of_transformers(llm: LLM, oracle: tuple[Any, Any]) -> None:
    tokenizer, _ = oracle
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = greedy(oracle, tokenizer(prompt)["input_ids"], 24)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)
        assert output.finished and output.outputs[0].finish_reason in ("length", "stop")


def test_logprobs_are_those_of_transformers(llm: LLM, oracle: tuple[Any, Any]) -> None:
    _, model = oracle
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate([list(range(300, 340))], params, use_tqdm=False)[0]
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    rows = list(output.prompt_logprobs[1:]) + list(output.outputs[0].logprobs)
    assert output.prompt_logprobs[0] is None and len(rows) == len(tokens) - 1
    for position, row in enumerate(rows):
        assert tokens[position + 1] in row
        for token_id, entry in row.items():
            assert entry.logprob == pytest.approx(expected[position, token_id].item(), abs=2e-4)
    assert output.outputs[0].cumulative_logprob == pytest.approx(
        sum(row[token].logprob for row, token in zip(rows[39:], output.outputs[0].token_ids, strict=True))
    )


def test_seeded_samples_are_the_same_alone_and_in_a_crowd(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True) for i in range(64)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(64)]
    crowd = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    for i in (0, 17, 33, 63):
        alone = llm.generate(prompts[i], params[i], use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == crowd[i]


def test_n_sequences_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate("The for", params, use_tqdm=False)[0] for _ in range(2))
    texts = [completion.text for completion in first.outputs]
    assert texts == [completion.text for completion in second.outputs] and len(set(texts)) > 1


def test_stop_strings_and_min_tokens(llm: LLM) -> None:
    text = llm.generate("The with statement", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = text[10:13]
    for include in (False, True):
        params = SamplingParams(temperature=0.0, max_tokens=24, stop=stop, include_stop_str_in_output=include)
        output = llm.generate("The with statement", params, use_tqdm=False)[0].outputs[0]
        assert output.text == text[: text.index(stop) + len(stop) * include]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    first = llm.generate("The with statement", GREEDY, use_tqdm=False)[0].outputs[0].token_ids[0]
    params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=4, stop_token_ids=[first])
    ids = llm.generate("The with statement", params, use_tqdm=False)[0].outputs[0].token_ids
    assert first not in ids[:4]


def test_chat_is_the_template_and_generate(llm: LLM, oracle: tuple[Any, Any]) -> None:
    tokenizer, _ = oracle
    messages = [{"role": "user", "content": "What is a list?"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert llm.preprocess_chat(messages)[0]["prompt_token_ids"] == expected
    assert llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == greedy(oracle, expected, 24)
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


def test_beam_search_finds_better_than_greedy(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    beams = llm.beam_search([{"prompt": "The with"}], params)[0].sequences
    scores = [beam.cumulative_logprob for beam in beams]
    params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=0, ignore_eos=True)
    alone = llm.generate("The with", params, use_tqdm=False)[0].outputs[0]
    assert scores == sorted(scores, reverse=True) and scores[0] >= alone.cumulative_logprob - 1e-4


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ("", ValueError, "empty"),
        ([], ValueError, "empty"),
        ([4096], ValueError, "vocabulary"),
        ([1] * 1024, ValueError, "max_model_len|long"),
        (3.5, TypeError, "prompt"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, ValueError, "takes no pictures"),
    ],
)
def test_bad_prompts_are_refused_at_the_door(llm: LLM, prompt: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        llm.generate([prompt] if isinstance(prompt, list) else prompt, GREEDY, use_tqdm=False)


def test_lists_must_match(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="priorit"):
        llm.generate(["a", "b"], GREEDY, priority=[1], use_tqdm=False)
    with pytest.raises(ValueError, match="priority=1 has no effect"):
        llm.generate(["a", "b"], GREEDY, priority=[0, 1], use_tqdm=False)


def test_the_engine_as_a_whole(llm: LLM) -> None:
    llm.generate("The", GREEDY, use_tqdm=False)
    names = {metric.name for metric in llm.get_metrics()}
    assert {"vllm:generation_tokens", "vllm:time_to_first_token_seconds", "vllm:kv_cache_usage_perc"} <= names
    assert llm.reset_prefix_cache() is True and llm.reset_prefix_cache(device="cuda") is True
    assert len(llm.collective_rpc("ping")) == 1
    with pytest.raises(TypeError, match="name"):
        llm.collective_rpc(lambda worker: 1)  # type: ignore[arg-type]
    llm.sleep()
    llm.wake_up()
    assert llm.generate("The", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert llm.get_default_sampling_params() == SamplingParams()


def test_options_that_do_not_exist() -> None:
    with pytest.raises(TypeError, match="max_model_len"):
        LLM("demo", max_modellen=5)
    with pytest.raises(
        ValueError, match=r"data_parallel_size=2 is not supported: .*pagewire route --spawn N"
    ):
        LLM("demo", data_parallel_size=2)
