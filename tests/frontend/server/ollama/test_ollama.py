"""Ollama's API without a model: what becomes of requests, lines, counts, what is refused and what is said."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.requests.checked_params import USUAL_LENGTH
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.timestamps import timestamp
from pagewire.frontend.server.ollama.conversation import with_call_ids
from pagewire.frontend.server.ollama.models import write_num_weights
from pagewire.frontend.server.ollama.writer import CallCollector
from pagewire.frontend.server.openai.protocol import FunctionCall, ToolCall
from pagewire.ipc.version import __version__
from pagewire.ipc.wire.messages import EngineInfo, Submit
from pagewire.ipc.wire.pooling import PoolingInfo
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client
from tests.frontend.server.parsing.test_tools_over_http import (
    CLOCK,
    HERMES,
    TEMPLATE,
    WEATHER,
    Replay,
    replay,
)

__all__ = ["replay"]  # a fixture

HELLO: list[Any] = [{"role": "user", "content": "w5 w6"}]
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


def lines_of(answer: Answer) -> list[Any]:
    """The lines of a stream."""
    assert answer.headers["content-type"] == "application/x-ndjson; charset=utf-8"
    return [json.loads(line) for line in answer.body.splitlines()]


def error_of(answer: Answer) -> tuple[int, str]:
    """Status and message of an error, which must have Ollama's shape."""
    (name,) = answer.json
    assert name == "error" and isinstance(answer.json["error"], str)
    return answer.status, answer.json["error"]


@pytest.fixture
def serve_replay(replay: Replay) -> Iterator[Callable[..., Client]]:
    """Makes servers that replay a text."""
    engine = AsyncLLM.attach(replay.core.address)
    yield lambda **options: Client(engine, chat_template=TEMPLATE, **options)
    engine.shutdown()


def test_lines_add_up_to_the_whole(client: Client) -> None:
    body = {"model": "fake", "messages": HELLO, "options": {"num_predict": 3, "temperature": 0}}
    whole = client.post("/api/chat", body | {"stream": False}).json
    *lines, last = lines_of(client.post("/api/chat", body))
    text = "".join(line["message"]["content"] for line in [*lines, last])
    assert whole["message"] == {"role": "assistant", "content": "w2 w3 w4"}
    assert text == "w2 w3 w4"
    assert all(set(line) == {"model", "created_at", "done", "message"} and not line["done"] for line in lines)
    for answer in (whole, last):
        assert (answer["model"], answer["done"], answer["done_reason"]) == ("fake", True, "length")
        assert (answer["prompt_eval_count"], answer["eval_count"]) == (2, 3)
        assert all(isinstance(answer[name], int) for name in DURATIONS)
        assert answer["total_duration"] > 0 and answer["load_duration"] == 0
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", answer["created_at"])
    document = client.get("/openapi.json").json
    schema = {"$ref": "#/components/schemas/OllamaChatAnswer", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(whole)
    assert "application/x-ndjson" in document["paths"]["/api/chat"]["post"]["responses"]["200"]["content"]


def test_options_reach_the_engine(client: Client, core: FakeCore) -> None:
    options = {
        "num_predict": 5,
        "top_k": 3,
        "repeat_penalty": 1.5,
        "seed": 7,
        "stop": ["x"],
        "repeat_last_n": -1,
    }
    body = {
        "model": "fake",
        "prompt": "w5",
        "stream": False,
        "options": options,
        "format": {"type": "object"},
    }
    assert client.post("/api/generate", body | {"logprobs": False}).status == 200
    (submitted,) = core.submitted.values()
    params = submitted.params
    assert (params.max_tokens, params.top_k, params.repetition_penalty) == (5, 3, 1.5)
    assert (params.seed, params.stop) == (7, ["x"]) and params.structured_outputs is not None
    client.post("/api/generate", {"prompt": "w5", "options": {"num_predict": -1}, "format": "json"})
    unlimited = core.submitted[max(core.submitted)].params
    assert unlimited.max_tokens > 100 and unlimited.structured_outputs is not None


def test_options_of_ollamas_clients_are_taken(
    client: Client, core: FakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"num_ctx": 1 << 20, "repeat_last_n": 64, "mirostat": 0, "repeat_penalty": 1.1, "num_keep": 4}
    answer = client.post("/api/chat", {"messages": HELLO, "stream": False, "options": options})
    assert answer.status == 200
    for text in (
        "num_ctx=1048576 has no effect: the context length is 4096",
        "repeat_last_n=64 has no effect",
    ):
        assert text in caplog.text
    assert "mirostat" not in caplog.text
    assert core.submitted[max(core.submitted)].params.repetition_penalty == 1.1
    off = {"repeat_last_n": 0, "repeat_penalty": 1.1}
    assert client.post("/api/chat", {"messages": HELLO, "options": off}).status == 200
    assert core.submitted[max(core.submitted)].params.repetition_penalty == 1.0


def test_the_oldest_turns_of_a_long_conversation_are_left_out(client: Client, core: FakeCore) -> None:
    turns: list[Any] = [{"role": "system", "content": "w7"}]
    for number in range(5):
        turns.append({"role": "user", "content": f"w{20 + number}" + " w5" * 999})
        turns.append({"role": "assistant", "content": "w6"})
    turns.append({"role": "user", "content": "w30"})
    answer = client.post("/api/chat", {"messages": turns, "stream": False})
    assert answer.status == 200 and "the first 4 messages" in answer.headers["warning"]
    ids = core.submitted[max(core.submitted)].prompt.token_ids
    assert (ids[0], ids[1], ids[-1]) == (7, 22, 30) and len(ids) == 3005 == answer.json["prompt_eval_count"]
    refused = client.post("/api/chat", {"messages": turns, "truncate": False})
    assert refused.status == 400 and "too long" in refused.json["error"]
    longest = client.post("/api/chat", {"messages": [{"role": "user", "content": "w5 " * 5000}]})
    assert longest.status == 400 and "too long" in longest.json["error"]


def test_what_is_not_given_is_as_local_models_have_it(client: Client, core: FakeCore) -> None:
    client.post("/api/chat", {"messages": HELLO, "stream": False})
    params = core.submitted[max(core.submitted)].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    room = client.engine.info.max_model_len
    assert params.max_tokens == min(USUAL_LENGTH, room - 2)
    client.post(
        "/api/chat", {"messages": HELLO, "stream": False, "options": {"temperature": 0.5, "min_p": 0}}
    )
    params = core.submitted[max(core.submitted)].params
    assert (params.temperature, params.top_k, params.min_p) == (0.5, 40, 0)
    client.post("/v1/chat/completions", {"model": "fake", "messages": HELLO, "max_tokens": 3})
    assert core.submitted[max(core.submitted)].params.temperature == 1  # OpenAI's


def test_prompts_are_messages_or_raw(serve_replay: Callable[..., Client], replay: Replay) -> None:
    replay.text = "Yes."
    client = serve_replay()
    answer = client.post("/api/generate", {"prompt": "a", "system": "s", "stream": False}).json
    assert answer["response"] == "Yes." and "message" not in answer
    expected = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert json.loads(replay.prompt) == expected
    raw = client.post("/api/generate", {"prompt": "a b", "raw": True})
    assert "".join(line["response"] for line in lines_of(raw)) == "Yes."
    assert replay.prompt == "a b"
    for path, body in (("/api/generate", {}), ("/api/chat", {"messages": []})):
        loaded = client.post(path, {"model": "fake"} | body).json
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")


def test_calls_are_whole_and_reasoning_is_apart(serve_replay: Callable[..., Client], replay: Replay) -> None:
    replay.text = f"<think>\nHm.\n</think>\n\n{HERMES}"
    client = serve_replay(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    asked: Any = {"messages": HELLO, "tools": [WEATHER, CLOCK], "think": True}
    whole = client.post("/api/chat", asked | {"stream": False}).json["message"]
    lines = [line["message"] for line in lines_of(client.post("/api/chat", asked))]
    calls = [call for line in lines for call in line.get("tool_calls", ())]
    assert (whole["content"], whole["thinking"]) == ("Let me see.", "Hm.")
    assert "".join(line["content"] for line in lines) == "Let me see."
    assert "".join(line.get("thinking", "") for line in lines) == "Hm."
    for call in calls + whole["tool_calls"]:
        assert call.pop("id")
    weather = {"name": "get_weather", "arguments": {"city": "Köln 🦊"}, "index": 0}
    assert calls == [{"function": weather}, {"function": {"name": "clock", "arguments": {}, "index": 1}}]
    assert whole["tool_calls"] == calls


def test_calls_get_ids_and_their_results_find_them() -> None:
    def call(name: str) -> Any:
        return {"function": {"name": name, "arguments": {}}}

    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g"), call("f")]},
        {"role": "tool", "content": "g", "tool_name": "g"},
        {"role": "tool", "content": "first f", "tool_name": "f"},
        {"role": "tool", "content": "second f"},
        {"role": "assistant", "content": "", "tool_calls": [call("f"), 3]},
        {"role": "tool", "content": "third f", "name": "f"},
    ]
    messages = with_call_ids(turns)
    ids = [found.get("id") for found in messages[0]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [message.get("tool_call_id") for message in messages[1:4]] == [ids[1], ids[0], ids[2]]
    assert (
        messages[4]["tool_calls"][1] == 3
        and messages[5]["tool_call_id"] == messages[4]["tool_calls"][0]["id"]
    )
    with pytest.raises(APIError, match="tool calls or more"):
        with_call_ids([{"role": "assistant", "tool_calls": [1] * 9000}] * 2)
    with pytest.raises(APIError, match=r"messages\[6\]: there is no call of 'f' before its result"):
        with_call_ids([*turns, {"role": "tool", "content": "", "tool_name": "f"}])


def test_a_call_is_whole_when_the_next_begins() -> None:
    collector = CallCollector()
    begin = [ToolCall(FunctionCall("f", '{"a"'), 0, "1", "function")]
    assert collector.add(begin, False) == []
    assert collector.add([ToolCall(FunctionCall(arguments=": 1}"), 0)], False) == []
    (first,) = collector.add([ToolCall(FunctionCall("g", "{"), 1, "2", "function")], False)
    assert (first.id, first.function.arguments, first.function.index) == ("1", {"a": 1}, 0)
    (second,) = collector.add([], True)
    assert (second.function.name, second.function.arguments) == ("g", {"INVALID_JSON": "{"})
    assert collector.add([], True) == []


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/api/chat", {"messages": [1]}, 400, "Expected `object`"),
        ("/api/chat", {"messages": HELLO, "priority": 5}, 400, "priority=5 has no effect"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, 400, "messages[0].images"),
        ("/api/chat", {"messages": HELLO, "think": True}, 400, "unknown (--reasoning-parser)"),
        ("/api/chat", {"messages": HELLO, "options": {"mirostat": 1}}, 400, "there is no Mirostat"),
        ("/api/chat", {"messages": HELLO, "options": {"speed": 1}}, 400, "unknown field `speed`"),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": 0}}, 400, "options.num_predict"),
        ("/api/generate", {"prompt": "w5", "suffix": "w6"}, 400, "suffix is not supported by this model"),
        ("/api/generate", {"prompt": "w5", "context": [1]}, 400, "send the conversation to /api/chat"),
        ("/api/generate", {"prompt": "w5", "template": "{{ .Prompt }}"}, 400, "--chat-template"),
        ("/api/generate", {"prompt": "w5", "images": ["x"]}, 400, "no pictures"),
        ("/api/generate", {"prompt": "w5", "raw": True, "system": "s"}, 400, "raw and suffix: "),
        ("/api/embed", {"input": "w5"}, 400, "generates"),
        ("/api/pull", {"model": "x"}, 400, "'/api/pull' is not served"),
        ("/api/show", {"model": "x"}, 404, "there is no model 'x'; served: fake"),
        ("/api/show", {}, 400, "model is required"),
        ("/api/nothing", {}, 404, "unknown path"),
    ],
    ids=range(17),
)
def test_what_is_refused_by_name(client: Client, path: str, body: Any, status: int, message: str) -> None:
    found, text = error_of(client.post(path, body))
    assert found == status and message in text, text


def test_a_stream_that_fails_ends_with_a_line(client: Client, core: FakeCore) -> None:
    core.auto = False

    async def fail() -> Answer:
        call = client.call("POST", "/api/generate", {"prompt": "w5"})
        await asyncio.to_thread(core.expect, Submit)
        (key,) = core.submitted
        core.tokens(key, [2])
        start = await call.message()
        core.tokens(key, [], finish_reason="abort")
        return await call.answer(start)

    *_, last = lines_of(client.run(fail))
    assert last == {"error": "the request was aborted"}


def test_what_has_no_effect_is_said(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "w5", "keep_alive": "5m", "options": {"num_ctx": 16, "num_gpu": 1, "num_predict": 2}}
    with caplog.at_level("WARNING", "pagewire.server"):
        assert client.post("/api/generate", body).status == 200
    for name in ("keep_alive", "options.num_ctx=16", "num_gpu"):
        assert f"{name} has no effect" in caplog.text


def test_models_are_listed_and_described(client: Client, core: FakeCore) -> None:
    (model,) = client.get("/api/tags").json["models"]
    assert model["name"] == model["model"] == "fake" and len(model["digest"]) == 64
    assert model["details"]["family"] == core.info.architecture
    (running,) = client.get("/api/ps").json["models"]
    assert running["context_length"] == core.info.max_model_len and running["digest"] == model["digest"]
    shown = client.post("/api/show", {"model": "fake"}).json
    assert shown["capabilities"] == ["completion", "tools"] and "messages" in shown["template"]
    name = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{name}.context_length"] == core.info.max_model_len
    assert client.get("/api/version").json == {"version": f"0.13.4+pagewire.{__version__}"}
    assert (write_num_weights(7_240_000_000), write_num_weights(135_000_000), write_num_weights(12)) == (
        "7.2B",
        "135.0M",
        "12.0",
    )
    assert timestamp(1.5) == "1970-01-01T00:00:01.500000Z"


def test_embeddings(new_core: Callable[..., FakeCore], engine_info: EngineInfo) -> None:
    core = new_core()
    core.info = msgspec.structs.replace(engine_info, pooling=PoolingInfo(["embed"], "LAST", 2))
    core.auto = True
    engine = AsyncLLM.attach(core.address)
    try:
        answer = Client(engine).post("/api/embed", {"input": ["w5 w6", "w7"], "model": "fake"})
        assert answer.json["embeddings"] == [[2.0, 11.0], [1.0, 7.0]]
        older = Client(engine).post("/api/embeddings", {"prompt": "w5 w6", "options": {"num_thread": 2}})
        assert older.json == {"embedding": [2.0, 11.0]}
        assert Client(engine).post("/api/embeddings", {"model": "fake"}).json == {"embedding": []}
        assert error_of(Client(engine).post("/api/embeddings", {"model": "x"}))[0] == 404
        assert (answer.json["model"], answer.json["prompt_eval_count"]) == ("fake", 3)
        assert Client(engine).post("/api/show", {"model": "fake"}).json["capabilities"] == ["embedding"]
    finally:
        engine.shutdown()
