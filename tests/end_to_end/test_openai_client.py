"""The `openai` package against the server, as its users write it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI

from pagewire import LLM, SamplingParams
from tests.end_to_end.http_server import Server

PROMPT = 'The "with" statement is used to'
QUESTION: Any = [{"role": "user", "content": "What is the with statement?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "second-name"]
    assert client.models.retrieve("second-name").id == "second-name"


def test_completion_is_what_llm_generates(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    (expected,) = llm.generate(PROMPT, params, use_tqdm=False)
    answer = client.completions.create(model="demo", prompt=PROMPT, temperature=0, max_tokens=24)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.usage is not None and answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids or ())
    ids = expected.prompt_token_ids or []
    again = client.completions.create(model="demo", prompt=ids, temperature=0, max_tokens=24)
    assert again.choices[0].text == expected.outputs[0].text


def test_chat_is_what_llm_answers(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    (expected,) = llm.chat(QUESTION, params, use_tqdm=False)
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason


@pytest.mark.parametrize("seed", range(6))
def test_streams_say_what_whole_answers_say(client: OpenAI, seed: int) -> None:
    """Over random parameters, on a real model."""
    rng = random.Random(seed)
    more: dict[str, Any] = {
        "temperature": rng.choice([0.0, 1.0, 1.5]),
        "max_tokens": rng.randint(1, 60),
        "n": rng.randint(1, 3),
        "seed": seed,
        "stop": rng.choice([None, ["\n"], [".", " the"]]),
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"include_stop_str_in_output": rng.random() < 0.5, "top_k": 50},
    }
    whole = client.chat.completions.create(model="demo", messages=QUESTION, **more)
    texts, reasons, tokens = {}, {}, {}
    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, stream=True, stream_options={"include_usage": True}, **more
    )
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
            if choice.logprobs and choice.logprobs.content:
                tokens.setdefault(choice.index, []).extend(one.token for one in choice.logprobs.content)
    # The first of the two may find less of the prompt in the cache.
    assert usage is not None and whole.usage is not None
    found, asked = (given.model_dump(exclude={"prompt_tokens_details"}) for given in (usage, whole.usage))
    assert found == asked
    for expected in whole.choices:
        assert texts[expected.index] == expected.message.content
        assert reasons[expected.index] == expected.finish_reason
        assert expected.logprobs and expected.logprobs.content
        assert tokens[expected.index] == [one.token for one in expected.logprobs.content]


def test_streamed_completions(client: OpenAI) -> None:
    more: dict[str, Any] = {"prompt": [PROMPT, "A"], "n": 2, "seed": 3, "max_tokens": 20, "echo": True}
    whole = client.completions.create(model="demo", logprobs=1, **more)
    found: dict[int, str] = {}
    offsets: dict[int, list[int]] = {}
    for chunk in client.completions.create(model="demo", stream=True, logprobs=1, **more):
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
            if choice.logprobs:
                offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset or [])
    assert found == {choice.index: choice.text for choice in whole.choices}
    for choice in whole.choices:
        assert choice.logprobs and offsets[choice.index] == choice.logprobs.text_offset
        assert choice.logprobs.token_logprobs and choice.logprobs.token_logprobs[0] is None


def test_helpers_for_streams(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=QUESTION, temperature=0, extra_body={"stop": ["func"]}
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text


def test_logprobs(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3)
    (expected,) = llm.chat(QUESTION, params, use_tqdm=False)
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    ids, positions = expected.outputs[0].token_ids, expected.outputs[0].logprobs or []
    for told, token_id, position in zip(logprobs.content, ids, positions, strict=True):
        assert position is not None
        assert told.token == position[token_id].decoded_token
        assert told.logprob == pytest.approx(position[token_id].logprob, abs=1e-5)
        best = sorted(position.values(), key=lambda entry: entry.rank or 0)[:3]
        assert [top.token for top in told.top_logprobs] == [entry.decoded_token for entry in best]
    text = answer.choices[0].message.content or ""
    assert b"".join(bytes(one.bytes or ()) for one in logprobs.content).decode() == text


def test_extra_parameters(client: OpenAI) -> None:
    beams = client.completions.create(
        model="demo", prompt=PROMPT, n=3, max_tokens=6, extra_body={"use_beam_search": True}
    )
    assert len({choice.text for choice in beams.choices}) == 3
    best = client.completions.create(model="demo", prompt=PROMPT, n=1, best_of=4, seed=1, max_tokens=8)
    alone = client.completions.create(model="demo", prompt=PROMPT, n=4, seed=1, max_tokens=8)
    assert best.choices[0].text in {choice.text for choice in alone.choices}
    biased = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=4, temperature=0, logit_bias={"100": 100}
    )
    assert biased.choices[0].text
    echoed = client.completions.create(model="demo", prompt=PROMPT, echo=True, max_tokens=0, logprobs=1)
    assert echoed.choices[0].text == PROMPT


class Statement(pydantic.BaseModel):
    """What is asked for."""

    keyword: Literal["with", "for"]
    lines: int = pydantic.Field(ge=0, le=99)


def test_parsed_answers(client: OpenAI) -> None:
    more: Any = {"messages": QUESTION, "temperature": 1.0, "seed": 1, "max_tokens": 100}
    answer = client.chat.completions.parse(model="demo", response_format=Statement, **more)
    assert isinstance(answer.choices[0].message.parsed, Statement)
    with client.chat.completions.stream(model="demo", response_format=Statement, **more) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    chosen = client.completions.create(
        model="demo", prompt=PROMPT, extra_body={"guided_choice": ["positive", "negative"]}
    )
    assert chosen.choices[0].text in ("positive", "negative")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="demo", prompt=PROMPT, extra_body={"guided_regex": "("})


def test_errors(client: OpenAI, server: Server) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        create(model="demo", messages=QUESTION, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="demo", messages=[{"role": "user", "content": "word " * 2000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.UnprocessableEntityError):
        create(model="demo", messages="Hello")  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="generates text and does not pool"):
        client.embeddings.create(model="demo", input="x")


def test_many_at_once(server: Server, client: OpenAI) -> None:
    """Each gets its own answer, also beside others who leave."""
    prompts = [
        f"The {word} statement" for word in ("with", "for", "if", "while", "def", "class", "del", "try")
    ]
    expected = [
        client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=30).choices[0].text
        for prompt in prompts
    ]

    async def ask(client: AsyncOpenAI, prompt: str, leaves: bool) -> str:
        stream = await client.completions.create(
            model="demo", prompt=prompt, temperature=0, max_tokens=30, stream=True
        )
        text = ""
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            if leaves:
                await stream.close()
                break
        return text

    async def play() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked = [(prompt, leaves) for prompt in prompts * 3 for leaves in (False, True)]
            return await asyncio.gather(*(ask(client, *one) for one in asked))

    answers = asyncio.run(play())
    assert answers[::2] == expected * 3
