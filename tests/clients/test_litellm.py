"""LiteLLM by its providers for OpenAI's, Anthropic's and Ollama's APIs."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tests.clients.scripts import ANSWER, TRIP, get_weather

ASK: list[Any] = [{"role": "user", "content": "What is the with statement?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PROVIDERS = {"openai/demo": "/v1", "hosted_vllm/demo": "/v1", "anthropic/demo": "", "ollama_chat/demo": ""}


@pytest.mark.parametrize("model", PROVIDERS)
@pytest.mark.parametrize("streams", [False, True])
def test_two_rounds_of_tools(scripted: str, model: str, streams: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": TRIP}]
    for _ in range(3):
        answer: Any = litellm.completion(
            model,
            messages,
            api_base=scripted + PROVIDERS[model],
            api_key="none",
            tools=[TOOL],
            stream=streams,
        )
        if streams:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = get_weather(**json.loads(call.function.arguments))
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": result}
            )
    assert message.content == ANSWER and not message.tool_calls
    assert answer.choices[0].finish_reason == "stop"
    assert [message["role"] for message in messages] == ["user", *["assistant", "tool"] * 2, "assistant"]


@pytest.mark.parametrize("model", PROVIDERS)
def test_answers_and_their_counts(url: str, model: str) -> None:
    fields: Any = {"api_base": url + PROVIDERS[model], "api_key": "none", "max_tokens": 16, "temperature": 0}
    whole: Any = litellm.completion(model, ASK, **fields)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 16
    parts: Any = list(
        litellm.completion(model, ASK, stream=True, stream_options={"include_usage": True}, **fields)
    )
    streamed: Any = litellm.stream_chunk_builder(parts, messages=ASK)
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.usage.completion_tokens == 16


@pytest.mark.parametrize(("model", "path"), [("openai/demo", "/v1"), ("ollama/demo", "")])
def test_embeddings(pooled: str, model: str, path: str) -> None:
    answer: Any = litellm.embedding(model, ["A list.", "A set."], api_base=pooled + path, api_key="none")
    assert [len(item["embedding"]) for item in answer.data] == [256, 256]


def test_errors_have_their_classes(url: str) -> None:
    fields: Any = {"api_base": url + "/v1", "api_key": "none"}
    with pytest.raises(litellm.BadRequestError):
        litellm.completion("openai/demo", ASK, temperature=-1, **fields)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion("openai/demo", [{"role": "user", "content": "word " * 5000}], **fields)


def test_text_completion(url: str) -> None:
    answer: Any = litellm.text_completion(
        model="text-completion-openai/demo",
        prompt='The "with" statement',
        api_base=url + "/v1",
        api_key="none",
        max_tokens=8,
        logprobs=2,
    )
    assert answer.choices[0].text and len(answer.choices[0].logprobs.tokens) == 8
