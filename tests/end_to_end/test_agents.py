"""What agents send, to a model that says anything: tools with a schema, reasoning before constrained answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from tests.end_to_end.http_server import Server
from tests.end_to_end.test_tools import NAMED, SCHEMAS, TOOLS
from tests.end_to_end.thinker import CLOSE, make_thinker

ASK: list[Any] = [{"role": "user", "content": "A room, please."}]
ANSWER = {
    "type": "object",
    "properties": {"word": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["word", "sure"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder of a model, and the token that ends its reasoning."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    return folder, make_thinker(folder)


@pytest.fixture(scope="module")
def client(thinker: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    options = [
        "--port",
        "0",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        "67108864",
        "--reasoning-parser",
        "deepseek_r1",
    ]
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--served-model-name", "thinker"]
    server = Server(tmp_path_factory.mktemp("server"), str(thinker[0]), *options, *tools)
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        assert server.stop() == 0


@pytest.fixture(scope="module")
def tokenizer(thinker: tuple[Path, int]) -> Tokenizer:
    return load_tokenizer(thinker[0])


@pytest.fixture
def request_fields(thinker: tuple[Path, int]) -> dict[str, Any]:
    """Fields with which the model ends its reasoning sooner or later."""
    bias = {str(thinker[1]): 9.0}
    return {"model": "thinker", "temperature": 1.0, "extra_body": {"logit_bias": bias}}


def check_answer(message: Any) -> None:
    jsonschema.validate(json.loads(message.content), ANSWER)


def test_calls_or_the_schema(client: openai.OpenAI, request_fields: dict[str, Any]) -> None:
    num_calls = 0
    for seed in range(12):
        request: Any = request_fields | {"messages": ASK, "tools": TOOLS[1:], "seed": seed, "max_tokens": 300}
        request |= {"parallel_tool_calls": False, "response_format": FORMAT}
        (choice,) = client.chat.completions.create(**request).choices
        message: Any = choice.message
        if choice.finish_reason == "length":
            continue
        assert CLOSE not in (message.reasoning_content or "") + (message.content or "")
        if message.tool_calls:
            assert choice.finish_reason == "tool_calls" and message.content is None
            for call in message.tool_calls:
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            num_calls += 1
        else:
            check_answer(message)
    assert 0 < num_calls < 12


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_required_calls_after_reasoning(
    client: openai.OpenAI, request_fields: dict[str, Any], choice: Any
) -> None:
    finished = 0
    for seed in range(4):
        request: Any = request_fields | {"messages": ASK, "tools": TOOLS, "seed": seed, "max_tokens": 400}
        answer = client.chat.completions.create(**request, tool_choice=choice, response_format=FORMAT)
        (answered,) = answer.choices
        if answered.finish_reason == "tool_calls":
            finished += 1
            for call in answered.message.tool_calls or ():
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert finished


def test_a_budget_ends_the_reasoning(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """Of a model that would go on for ever; the answer follows its schema, and says why the reasoning has ended."""
    for budget in (0, 7):
        request: Any = {"model": "thinker", "messages": ASK, "response_format": FORMAT, "seed": 1}
        extra = {"thinking_token_budget": budget, "return_token_ids": True}
        (choice,) = client.chat.completions.create(**request, max_tokens=200, extra_body=extra).choices
        assert choice.model_extra["thinking_finish_reason"] == "budget"
        token_ids = choice.model_extra["token_ids"]
        assert tokenizer.decode(token_ids[budget : budget + 1], False) == CLOSE
        check_answer(choice.message)
        stream = client.chat.completions.create(**request, max_tokens=200, extra_body=extra, stream=True)
        *_, last = (chunk.choices[0] for chunk in stream)
        assert last.model_extra["thinking_finish_reason"] == "budget"
    body = {"model": "thinker", "max_tokens": 40, "messages": [{"role": "user", "content": "Why?"}]}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 5}, "temperature": 1.0}
    message = client.post("/messages", body=body, cast_to=dict[str, Any])
    thought, text = message["content"]
    assert (thought["type"], text["type"]) == ("thinking", "text")
    assert len(tokenizer.encode(thought["thinking"])) <= 5


def test_an_answer_after_reasoning(client: openai.OpenAI, request_fields: dict[str, Any]) -> None:
    thoughts = []
    for seed in range(6):
        request: Any = request_fields | {"messages": ASK, "seed": seed, "max_tokens": 400}
        (whole,) = client.chat.completions.create(**request, response_format=FORMAT).choices
        content = thought = ""
        for chunk in client.chat.completions.create(**request, response_format=FORMAT, stream=True):
            delta: Any = chunk.choices[0].delta
            content += delta.content or ""
            thought += getattr(delta, "reasoning_content", None) or ""
        message: Any = whole.message
        assert (message.content or "", getattr(message, "reasoning_content", None) or "") == (
            content,
            thought,
        )
        if whole.finish_reason == "stop":
            check_answer(message)
            thoughts.append(thought)
    assert any(thoughts)


def test_responses_with_reasoning(
    client: openai.OpenAI, request_fields: dict[str, Any], tokenizer: Tokenizer
) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}}
    include: Any = ["message.output_text.logprobs"]
    request: Any = request_fields | {
        "input": "A room?",
        "text": text,
        "include": include,
        "max_output_tokens": 400,
    }
    finished = 0
    for seed in range(4):
        body = {**request["extra_body"], "seed": seed}
        response = client.responses.create(**(request | {"extra_body": body}))
        if response.status != "completed":
            continue
        finished += 1
        message: Any = response.output[-1]
        jsonschema.validate(json.loads(response.output_text), ANSWER)
        logprobs = message.content[0].logprobs
        assert "".join(token.token for token in logprobs).strip() == response.output_text
        assert response.usage is not None
        reasoning = response.usage.output_tokens_details.reasoning_tokens
        assert 1 <= reasoning <= response.usage.output_tokens - len(logprobs)
        thought: Any = response.output[0]
        if thought.type == "reasoning":
            assert thought.content[0].text and reasoning > 1
    assert finished
