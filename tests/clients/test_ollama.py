"""Ollama's API as its own client sees it: answers, streams, rounds of tools, schemas, reasoning and models."""

from __future__ import annotations

import json
from typing import Any

import ollama
import pytest

from tests.clients.scripts import ANSWER, TRIP, get_weather

ASK: list[Any] = [{"role": "user", "content": "What is the with statement?"}]
SHORT: Any = {"temperature": 0, "num_predict": 24}
FORECAST = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": FORECAST}}


@pytest.fixture(scope="module")
def client(url: str) -> ollama.Client:
    return ollama.Client(url, timeout=60)


def test_a_stream_says_what_an_answer_says(client: ollama.Client) -> None:
    whole = client.chat("demo", ASK, options=SHORT)
    parts = list(client.chat("demo", ASK, options=SHORT, stream=True))
    assert whole.message.content
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    for last in (whole, parts[-1]):
        assert (last.done, last.done_reason, last.eval_count) == (True, "length", 24)
        assert last.eval_duration and last.prompt_eval_count and last.total_duration
        assert last.total_duration >= last.eval_duration
    assert not any(part.done for part in parts[:-1])
    again = client.generate("demo", ASK[0]["content"], options=SHORT)
    assert again.response == whole.message.content
    raw = list(client.generate("demo", 'The "with" statement', raw=True, options=SHORT, stream=True))
    assert "".join(part.response or "" for part in raw)


def test_an_answer_follows_a_schema(client: ollama.Client) -> None:
    for seed in range(20):
        options: Any = {"seed": seed, "num_predict": 100}
        answer = client.chat("demo", ASK, format=FORECAST, options=options)
        if answer.done_reason == "stop":  # the demo model writes white space until it is cut, with some seeds
            break
    found = json.loads(answer.message.content or "")
    assert found["city"] in ("Oslo", "Rome") and 1 <= found["days"] <= 9


def test_two_rounds_of_tools(client: ollama.Client) -> None:
    call: Any = {"function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}}
    messages = list(ASK)
    for _ in range(2):
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_name": "get_weather", "content": "It rains."})
        answer = client.chat("demo", messages, tools=[TOOL], options=SHORT)
        assert answer.message.role == "assistant" and answer.eval_count


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_has_two_rounds_of_tools(scripted: str, streams: bool) -> None:
    client, messages = ollama.Client(scripted, timeout=60), [{"role": "user", "content": TRIP}]
    for _ in range(3):
        answer: Any = client.chat("demo", messages, tools=[get_weather], stream=streams)
        parts = [part.message for part in answer] if streams else [answer.message]
        content = "".join(part.content or "" for part in parts)
        calls = [call for part in parts for call in part.tool_calls or ()]
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})  # type: ignore[dict-item]
        for call in calls:
            result = get_weather(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    assert content == ANSWER and len(messages) == 6


def test_reasoning_is_apart(client: ollama.Client) -> None:
    answer = client.chat("demo", ASK, think=True, options=SHORT)
    assert answer.message.thinking and not answer.message.content  # the demo model never ends its reasoning


def test_embeddings(pooled: str) -> None:
    client = ollama.Client(pooled, timeout=60)
    texts = ["A list.", "A set."]
    vectors = client.embed("demo", texts).embeddings
    assert [len(vector) for vector in vectors] == [256, 256]
    assert client.embeddings("demo", texts[1]).embedding == vectors[1]


def test_models(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == "demo" and model.size and model.details and model.details.parameter_size
    (running,) = client.ps().models
    assert running.model == "demo" and running.digest == model.digest
    shown = client.show("demo")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo and shown.modelinfo["general.parameter_count"] > 0


def test_errors_are_the_client_s_own(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="there is no model") as error:
        client.show("llama")
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="is not served"):
        client.pull("llama")
    with pytest.raises(ollama.ResponseError, match="generates"):
        client.embed("demo", "a")
    with pytest.raises(ollama.ResponseError, match="no pictures"):
        client.chat("demo", [{"role": "user", "content": "a", "images": [b"x"]}])


def test_models_are_pulled_used_and_removed(pulling: str) -> None:
    """From a hub on loopback: with its progress, on demand, ended by keep_alive, gone after rm."""
    client = ollama.Client(pulling, timeout=120, headers={"X-Pagewire-Admin": "1"})
    steps = list(client.pull("hf.co/demo/plain", stream=True))
    assert steps[0].status == "pulling manifest" and steps[-1].status == "success"
    files = [step for step in steps if step.digest]
    assert len({step.digest for step in files}) >= 3 and files[-1].completed == files[-1].total
    assert client.pull("hf.co/demo/gguf:Q8_0").status == "success"
    listed = {model.model: model for model in client.list().models}
    assert set(listed) == {"hf:demo/plain", "hf:demo/gguf:Q8_0"}
    assert listed["hf:demo/gguf:Q8_0"].size == 2_000_000
    assert client.ps().models == []
    answer = client.generate("hf.co/demo/plain", "The with statement", options=SHORT, keep_alive="5m")
    assert answer.eval_count == 24 and answer.model == "hf:demo/plain"
    (running,) = client.ps().models
    assert running.model == "hf:demo/plain" and running.digest == listed["hf:demo/plain"].digest
    assert running.expires_at and running.expires_at.year < 9999
    assert client.show("hf:demo/plain").capabilities
    client.generate("hf:demo/plain", keep_alive=0)
    while client.ps().models:
        pass
    for name in listed:
        assert client.delete(name).status == "success"
    assert client.list().models == []
    with pytest.raises(ollama.ResponseError, match="there is no model 'hf:demo/plain'") as error:
        client.generate("hf:demo/plain", "a")
    assert error.value.status_code == 404


def test_what_cannot_be_pulled_is_said(pulling: str) -> None:
    client = ollama.Client(pulling, timeout=60, headers={"X-Pagewire-Admin": "1"})
    with pytest.raises(ollama.ResponseError, match="demo/gguf has no 'Q3_K_S'; it has: Q8_0, Q4_K_M"):
        client.pull("hf.co/demo/gguf:Q3_K_S")
    with pytest.raises(ollama.ResponseError, match="no model 'demo/other'"):
        list(client.pull("hf.co/demo/other", stream=True))
    with pytest.raises(ollama.ResponseError, match="write hf:owner/repository:Q4_K_M"):
        client.pull("llama3.2")
    with pytest.raises(ollama.ResponseError, match="pagewire serve --models FILE"):
        client.copy("a", "b")
    with pytest.raises(ollama.ResponseError, match="was not pulled"):
        client.delete("hf:demo/plain")
    with pytest.raises(ollama.ResponseError, match="X-Pagewire-Admin"):
        ollama.Client(pulling).pull("hf.co/demo/gguf")
