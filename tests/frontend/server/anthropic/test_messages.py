"""/v1/messages without a model: what becomes of requests, blocks, events in their order, counts and errors."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec
import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.anthropic.conversation import anthropic_messages, chat_of_anthropic
from pagewire.frontend.server.anthropic.protocol import MessagesRequest
from pagewire.frontend.server.anthropic.writer import EventWriter
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import begin_warnings
from pagewire.frontend.server.openai.reply import ReplyWithCalls, call_arguments, feed_parser
from pagewire.frontend.server.parsing.choice import tool_use
from pagewire.frontend.server.parsing.reasoning import parser_for, thinking
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.wire.messages import Abort, EngineInfo, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client
from tests.frontend.server.parsing.test_tools_over_http import HERMES, TEMPLATE, Replay, replay

__all__ = ["replay"]  # a fixture

PATH = "/v1/messages"
HELLO: list[Any] = [{"role": "user", "content": "w5 w6"}]
WEATHER = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"name": "clock", "description": "The time.", "input_schema": {"type": "object"}}
THOUGHT = "Hm, Köln."


def request(**fields: Any) -> MessagesRequest:
    return msgspec.convert({"max_tokens": 8, "messages": HELLO} | fields, MessagesRequest)


def events_of(answer: Answer) -> list[Any]:
    """The events of a stream, whose names are their types."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, nothing = answer.body.decode().split("\n\n")
    assert nothing == ""
    return [decoded(event) for event in events]


def decoded(event: str) -> Any:
    name, data = event.split("\n")
    value = json.loads(data.removeprefix("data: "))
    assert name == f"event: {value['type']}"
    return value


def gathered(events: list[Any]) -> list[Any]:
    """The blocks that a client makes of events, whose order is checked."""
    blocks: list[Any] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            is_open = True
            blocks.append({**event["content_block"]})
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == len(blocks) - 1
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(blocks[-1]["input"] or "{}")
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            kind, text = event["delta"].popitem()
            if kind == "partial_json":
                blocks[-1]["input"] = (blocks[-1]["input"] or "") + text
            else:
                blocks[-1][kind] += text
    assert not is_open
    return blocks


def error_of(answer: Answer) -> tuple[int, str, str]:
    """Status, class and message of an error, which must have Anthropic's shape."""
    assert set(answer.json) == {"type", "error"} and answer.json["type"] == "error"
    return answer.status, answer.json["error"]["type"], answer.json["error"]["message"]


# ---------------------------------------------------------------- requests


def test_turns_become_messages() -> None:
    warnings = begin_warnings("id")
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "2", "content": "two", "is_error": True},
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}]},
                {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    system = [{"type": "text", "text": "s"}]
    a, b, c = ({"type": "text", "text": text} for text in "abc")

    def call(name: str, function: str, arguments: Any) -> Any:
        return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}

    assert anthropic_messages(request(system=system, messages=turns)) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [a, b, c]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("1", "f", {"a": 1}), call("2", "g", {})],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "2", "content": "two", "is_error": True},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "It is"},
    ]
    assert ["redacted_thinking" in text for text in warnings.texts] == [True]
    assert chat_of_anthropic(request(messages=turns), False).continue_final_message
    assert not chat_of_anthropic(request(messages=turns[:-1]), False).continue_final_message


def test_fields_become_those_of_a_chat_completion() -> None:
    chat = chat_of_anthropic(
        request(
            tools=[CLOCK],
            tool_choice={"type": "tool", "name": "clock", "disable_parallel_tool_use": True},
            thinking={"type": "adaptive"},
            output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            stop_sequences=["\n"],
            top_k=3,
        ),
        False,
    )
    function = {"name": "clock", "description": "The time.", "parameters": {"type": "object"}}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "clock"}}
    assert (chat.parallel_tool_calls, chat.max_completion_tokens, chat.stop) == (False, 8, ["\n"])
    assert (chat.top_k, chat.reasoning_effort) == (3, "low")
    assert chat.chat_template_kwargs == {"enable_thinking": True}
    assert chat.response_format is not None and chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema == {"type": "object"}
    choices = {
        kind: chat_of_anthropic(request(tools=[CLOCK], tool_choice={"type": kind}), False).tool_choice
        for kind in ("auto", "any", "none")
    }
    assert choices == {"auto": "auto", "any": "required", "none": "none"}
    assert chat_of_anthropic(request(), False).chat_template_kwargs == {}
    assert chat_of_anthropic(request(), True).chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (
            [{"role": "user", "content": [{"type": "image", "source": {}}]}],
            "messages[0].content[0]: Object missing required field `type` - at `$.source`",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "document", "source": {"type": "base64", "data": "JVBERg=="}}],
                }
            ],
            "messages[0].content[0]: a document must be text: give the text of a PDF",
        ),
        (
            [{"role": "user", "content": [{"type": "tool_use"}]}],
            "one of text, image, document, search_result, tool_result here, got 'tool_use'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            "messages[0].content[0]: Expected `str`",
        ),
        ([{"role": "user", "content": [{"type": ["x"]}]}], "must be one of text"),
        ([{"role": "user", "content": [1]}], "must be one of text"),
        ([{"role": "user"}], "must be text or a list of blocks"),
        ([{"role": "tool", "content": ""}], "messages[0].role must be one of user, assistant, system"),
        ([], "messages is empty"),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}],
            "needs a tool_result",
        ),
    ],
    ids=range(10),
)
def test_what_is_refused_by_name(turns: list[Any], message: str) -> None:
    with pytest.raises(APIError) as refusal:
        anthropic_messages(request(messages=turns))
    assert message in str(refusal.value) and refusal.value.status == 400


def test_many_turns_take_no_more_than_their_length() -> None:
    thought = [{"type": "thinking", "thinking": "x" * 100}, {"type": "text", "text": "y"}]
    (message,) = anthropic_messages(request(messages=[{"role": "assistant", "content": thought}] * 8000))
    assert message["reasoning_content"] == "x" * 800_000 and len(message["content"]) == 8000
    result = {"type": "tool_result", "tool_use_id": "1", "content": [1] * (1 << 14)}
    for blocks in ([1] * (1 << 14 | 1), [result]):
        with pytest.raises(APIError, match="blocks or more"):
            anthropic_messages(request(messages=[{"role": "user", "content": blocks}]))


# ---------------------------------------------------------------- answers


def test_a_message(client: Client, core: FakeCore) -> None:
    whole = client.post(PATH, {"model": "fake", "max_tokens": 3, "messages": HELLO})
    assert whole.status == 200, whole.body
    message = whole.json
    assert message.pop("id").startswith("msg_")
    usage = {"input_tokens": 2, "output_tokens": 3}
    cached = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "service_tier": "standard"}
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "w2 w3 w4"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": usage | cached,
    }
    (submitted,) = core.submitted.values()
    assert submitted.params.max_tokens == 3
    document = client.get("/openapi.json").json
    schema = {"$ref": "#/components/schemas/GeneratedMessage", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(whole.json)
    longer = client.post(PATH, {"model": "fake", "max_tokens": 300, "messages": HELLO}).json
    assert longer["stop_reason"] == "model_context_window_exceeded"  # the core ended it before that
    core.reason = "stop"
    assert client.post(PATH, {"max_tokens": 9, "messages": HELLO}).json["stop_reason"] == "end_turn"
    stopped = client.post(PATH, {"max_tokens": 9, "messages": HELLO, "stop_sequences": ["w3"]}).json
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "w3")
    assert stopped["content"] == [{"type": "text", "text": "w2 "}]


def test_the_events_of_a_stream(client: Client) -> None:
    answer = client.post(PATH, {"model": "fake", "max_tokens": 3, "messages": HELLO, "stream": True})
    events = events_of(answer)
    kinds = [event["type"] for event in events]
    unique = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    assert unique == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[0]["message"]["usage"]["input_tokens"] == 2
    assert gathered(events) == [{"type": "text", "text": "w2 w3 w4"}]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 3


def test_calls_streamed_and_whole(replay: Replay, engine_on_replay: AsyncLLM) -> None:
    replay.text = HERMES
    client = Client(
        engine_on_replay, chat_template=TEMPLATE, enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    body = {"max_tokens": 99, "messages": HELLO, "tools": [WEATHER, CLOCK]}
    whole = client.post(PATH, body).json
    assert whole["stop_reason"] == "tool_use"
    text, weather, clock = whole["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (weather["name"], weather["input"]) == ("get_weather", {"city": "Köln 🦊"})
    assert (clock["name"], clock["input"]) == ("clock", {})
    assert json.loads(replay.prompt.partition("]")[0] + "]")[1]["function"]["parameters"] == {
        "type": "object"
    }
    events = events_of(client.post(PATH, body | {"stream": True}))
    streamed = gathered(events)
    for block in streamed + whole["content"]:
        block.pop("id", None)
    assert streamed == whole["content"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.fixture
def engine_on_replay(replay: Replay) -> Any:
    engine = AsyncLLM.attach(replay.core.address)
    yield engine
    engine.shutdown()


def test_blocks_do_not_depend_on_how_the_text_comes() -> None:
    text = f"<think>\n{THOUGHT}\n</think>\n\n{HERMES}"

    def written(size: int, omits: bool = False) -> list[Any]:
        tools = tool_use([{"type": "function", "function": {"name": "clock"}}], parser="hermes")
        parser = parser_for(thinking(tools, "qwen3"), "")
        assert parser is not None
        reader, writer, events = ReplyWithCalls(parser), EventWriter(omits), b""
        for start in range(0, len(text), size):
            events += writer.read(feed_parser(reader, text[start : start + size], start + size >= len(text)))
        events += writer._close()
        blocks = gathered([decoded(event) for event in events.decode().split("\n\n")[:-1]])
        for block in blocks:
            block.pop("id", None)
        return blocks

    thought, *others = written(len(text))
    assert thought["thinking"] == THOUGHT
    assert thought["signature"] == hashlib.sha256(THOUGHT.encode()).hexdigest()
    assert [block["type"] for block in others] == ["text", "tool_use", "tool_use"]
    for size in (1, 2, 3, 7, 50):
        assert written(size) == [thought, *others]
    assert written(3, omits=True) == [thought | {"thinking": ""}, *others]


def test_arguments_that_are_no_object() -> None:
    assert call_arguments('{"a": [1]}') == {"a": [1]}
    assert call_arguments("") == call_arguments(msgspec.UNSET) == {}
    for text in ('{"a": [1', "[1]", "x", "[" * 100_000):
        assert call_arguments(text) == {"INVALID_JSON": text}


# ---------------------------------------------------------------- counts, errors, access


def test_tokens_are_counted_as_they_are_used(client: Client) -> None:
    body = {"messages": HELLO, "system": "w7"}
    used = client.post(PATH, body | {"max_tokens": 3}).json["usage"]["input_tokens"]
    assert client.post(PATH + "/count_tokens", body).json == {"input_tokens": used} == {"input_tokens": 3}


def test_tools_are_counted_where_the_model_may_not_choose_them(
    replay: Replay, engine_on_replay: AsyncLLM
) -> None:
    replay.text = "{}"
    client = Client(engine_on_replay, chat_template=TEMPLATE, tool_call_parser="none")
    body = {"messages": HELLO, "tools": [WEATHER, CLOCK]}
    status, kind, message = error_of(client.post(PATH, body | {"max_tokens": 3}))
    assert (status, kind) == (400, "invalid_request_error") and "the type 'none', 'any' or 'tool'" in message
    forced = body | {"tool_choice": {"type": "tool", "name": "clock"}}
    used = client.post(PATH, forced | {"max_tokens": 3}).json["usage"]["input_tokens"]
    without = client.post(PATH + "/count_tokens", {"messages": HELLO}).json["input_tokens"]
    for counted in (body, forced):
        answer = client.post(PATH + "/count_tokens", counted).json
        assert answer == {"input_tokens": used} and used > without


def test_errors_have_its_shape(client: Client, core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"max_tokens": 3, "messages": HELLO}
    named = {
        "max_tokens": client.post(PATH, {"messages": HELLO}),
        "top_p": client.post(PATH, body | {"top_p": 7}),
        "messages[0].content": client.post(PATH + "/count_tokens", {"messages": [{"role": "user"}]}),
        "messages": client.post(PATH + "/count_tokens", {}),
        "priority=5 has no effect": client.post(PATH, body | {"priority": 5}),
        "mcp_servers": client.post(PATH, body | {"mcp_servers": [{"url": "x"}]}),
        "anthropic-version": client.post(PATH, body, **{"anthropic-version": "2030-01-01"}),
        "tools[0]": client.post(PATH, body | {"tools": [{"type": "abacus_20250124", "name": "abacus"}]}),
        "tools[0].input_schema": client.post(PATH, body | {"tools": [{"name": "f"}]}),
        "tools[0].name": client.post(PATH, body | {"tools": [CLOCK | {"name": "a b"}]}),
        "the prompt is too long": client.post(
            PATH, body | {"messages": [{"role": "user", "content": "w5 " * 9999}]}
        ),
        "tool_use_id": client.post(
            PATH,
            body | {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
        ),
    }
    for text, answer in named.items():
        status, kind, message = error_of(answer)
        assert (status, kind) == (400, "invalid_request_error") and text in message, message
    strict = Client(client.engine, any_model_name=False)
    unknown = strict.post(PATH, body | {"model": "x"}, **{"x-request-id": "mine"})
    assert error_of(unknown)[:2] == (404, "not_found_error") and unknown.headers["request-id"] == "mine"
    assert error_of(client.post(PATH + "/nothing"))[:2] == (404, "not_found_error")
    assert error_of(client.get(PATH))[0] == 405
    assert set(client.get("/v1/messagesx").json["error"]) == {"message", "type", "param", "code"}

    def busy(*args: Any, **options: Any) -> Any:
        raise EngineBusyError("too many wait")

    monkeypatch.setattr(AsyncLLM, "generate_all", busy)
    overloaded = client.post(PATH, body)
    assert error_of(overloaded)[:2] == (529, "overloaded_error") and overloaded.headers["retry-after"] == "1"


def test_a_stream_that_fails_ends_with_an_event(client: Client, core: FakeCore) -> None:
    core.auto = False

    async def fail() -> Answer:
        call = client.call("POST", PATH, {"max_tokens": 9, "messages": HELLO, "stream": True})
        await asyncio.to_thread(core.expect, Submit)
        (key,) = core.submitted
        core.tokens(key, [2])
        start = await call.message()
        core.tokens(key, [], finish_reason="abort")
        return await call.answer(start)

    *_, last = events_of(client.run(fail))
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the request was aborted"}}


def test_a_client_that_leaves_ends_its_request(client: Client, core: FakeCore) -> None:
    core.auto = False

    async def leave() -> None:
        call = client.call("POST", PATH, {"max_tokens": 9, "messages": HELLO})
        await asyncio.to_thread(core.expect, Submit)
        call.hang_up()
        await call.task

    client.run(leave)
    assert core.expect(Abort)


def test_keys_come_as_anthropic_s_clients_send_them(serve: Callable[..., Client], core: FakeCore) -> None:
    core.auto = True
    client = serve(api_key=["right"])
    body = {"max_tokens": 1, "messages": HELLO}
    for headers in (
        {"x-api-key": "right"},
        {"authorization": "Bearer right"},
        {"authorization": "Bearer wrong", "x-api-key": "right"},
    ):
        assert client.post(PATH, body, **headers).status == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "right"}):
        assert error_of(client.post(PATH, body, **headers))[:2] == (401, "authentication_error")


def test_what_has_no_effect_is_said(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    body = {"max_tokens": 1, "messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with caplog.at_level("WARNING", "pagewire.server"):
        assert client.post(PATH, body | {"speed": "fast", "context_management": {"edits": []}}).status == 200
    for name in ("budget_tokens", "'enable_thinking'", "'speed'"):
        assert name in caplog.text
    assert "context_management" not in caplog.text


def test_threads_are_refused_so_that_clients_send_all(client: Client) -> None:
    answer = client.post(PATH, {"max_tokens": 4, "messages": HELLO, "thread": {"type": "create"}})
    error = answer.json["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error") and "send all messages" in error[
        "message"
    ]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_models_have_the_shape_of_the_api_whose_header_a_request_has(
    new_core: Callable[..., FakeCore], engine_info: EngineInfo
) -> None:
    core = new_core()
    core.info = msgspec.structs.replace(engine_info, served_model_names=["one", "two", "three"])
    engine = AsyncLLM.attach(core.address)
    try:
        client = Client(engine)

        def get(path: str, version: str = "2023-06-01") -> Answer:
            return client.get("/v1/models" + path, **{"anthropic-version": version})

        assert client.get("/v1/models").json["object"] == "list"
        assert client.get("/v1/models/nothing").error["code"] == "model_not_found"
        whole = get("").json
        assert [model["id"] for model in whole["data"]] == ["one", "two", "three"]
        assert (whole["first_id"], whole["last_id"], whole["has_more"]) == ("one", "three", False)
        assert get("/two").json == whole["data"][1]
        assert whole["data"][1]["type"] == "model" and whole["data"][1]["max_input_tokens"] > 0
        for query, ids, has_more in (
            ("?limit=2", ["one", "two"], True),
            ("?limit=2&after_id=two", ["three"], False),
            ("?limit=1&before_id=three", ["two"], True),
            ("?limit=1&before_id=two", ["one"], False),
            ("?after_id=three", [], False),
        ):
            page = get(query).json
            assert [model["id"] for model in page["data"]] == ids and page["has_more"] is has_more, query
        for path, version, status, kind in (
            ("/nothing", "2023-06-01", 404, "not_found_error"),
            ("?limit=0", "2023-06-01", 400, "invalid_request_error"),
            ("?after_id=x", "2023-06-01", 400, "invalid_request_error"),
            ("?after_id=one&before_id=two", "2023-06-01", 400, "invalid_request_error"),
            ("", "1999-01-01", 400, "invalid_request_error"),
        ):
            answer = get(path, version)
            assert answer.status == status and answer.json["type"] == "error", path
            assert answer.json["error"]["type"] == kind and "request-id" in answer.headers
    finally:
        engine.shutdown()
