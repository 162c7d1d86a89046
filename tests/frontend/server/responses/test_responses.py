"""/v1/responses without a model: items, events under any chunking, the store, and errors midway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.protocol import TokenLogprob
from pagewire.frontend.server.openai.reply import ReplyParser, ReplyWithCalls, TextReply, feed_parser
from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.dialects import DIALECTS
from pagewire.frontend.server.responses.items import item_messages, read_input
from pagewire.frontend.server.responses.protocol import (
    CallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningOptions,
    ReasoningText,
    Response,
    ResponseFailure,
    TextFormat,
    TextOptions,
)
from pagewire.frontend.server.responses.store import ResponseStore, StoredItems, StoredResponse
from pagewire.frontend.server.responses.writer import ResponseWriter
from pagewire.frontend.server.serving.usage import Usage
from pagewire.ipc.wire.messages import Abort, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Call, Client
from tests.frontend.server.parsing.test_tools_over_http import HERMES, Replay, replay

__all__ = ["replay"]  # a fixture

PATH = "/v1/responses"
ITEM_EVENTS = ("content_part", "output_text", "reasoning_text", "function_call", "output_item")


def new_response(name: str = "resp_1", **fields: Any) -> Response:
    given: dict[str, Any] = {
        "id": name,
        "created_at": 0,
        "status": "in_progress",
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "model": "fake",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": ReasoningOptions(),
        "store": True,
        "temperature": 1.0,
        "text": TextOptions(),
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
        "metadata": {},
    }
    return Response(**(given | fields))


# ---------------------------------------------------------------- items


def test_items_become_messages_with_their_calls() -> None:
    items = read_input(
        [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "2", "output": "two"},
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [{"type": "input_text", "text": "one"}],
            },
            {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
        ]
    )
    assert all(item["id"].partition("_")[0] in ("msg", "fc", "fco") for item in items)
    assert len({item["id"] for item in items}) == len(items)

    def call(name: str, function: str) -> Any:
        return {"id": name, "type": "function", "function": {"name": function, "arguments": "{}"}}

    assert item_messages("First.", items) == [
        {
            "role": "system",
            "content": [{"type": "text", "text": "First."}, {"type": "text", "text": "Be brief."}],
        },
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"role": "assistant", "content": "No.", "tool_calls": [call("1", "f"), call("2", "g")]},
        {"role": "tool", "tool_call_id": "2", "name": "g", "content": "two"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "one"},
        {"role": "assistant", "content": None, "tool_calls": [call("3", "f")]},
    ]


# ---------------------------------------------------------------- events


def written(parser: ReplyParser, pieces: list[str]) -> tuple[list[Any], Response]:
    """The events of an output that comes in these pieces, and the response that it becomes."""
    writer = ResponseWriter(new_response())
    encoded = writer.create() + writer.start()
    for place, piece in enumerate(pieces):
        encoded += writer.read(feed_parser(parser, piece, place == len(pieces) - 1))
    encoded += writer.end("completed", Usage(1, 2, 3))
    events = []
    for event in encoded:
        name, data = event.decode().removesuffix("\n\n").split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events, writer.response


def joined_items(events: list[Any]) -> list[Any]:
    """The items that a client makes of events, each of which must fit what came before."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind.startswith(ITEM_EVENTS):
            item = items[event["output_index"]]
            assert event["output_index"] == len(items) - 1  # one item is open at a time
            assert event.get("item_id", item["id"]) == item["id"] and item["status"] == "in_progress"
            if kind == "content_part.added":
                item["content"].append(event["part"])
            elif kind in ("output_text.delta", "reasoning_text.delta"):
                assert event["delta"]
                item["content"][event["content_index"]]["text"] += event["delta"]
            elif kind == "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            elif kind in ("output_text.done", "reasoning_text.done"):
                assert event["text"] == item["content"][event["content_index"]]["text"]
            elif kind == "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            elif kind == "content_part.done":
                assert event["part"] == item["content"][event["content_index"]]
            else:
                item["status"] = "completed"
                assert event["item"] == item
    return items


def without_ids(response: Response) -> list[Any]:
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in msgspec.to_builtins(response.output)
    ]


@settings(max_examples=150, deadline=None)
@given(text=st.sampled_from([HERMES, "Let me see.", "", "<tool_call", HERMES[12:]]), data=st.data())
def test_events_add_up_to_the_response_under_any_chunking(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for new_parser in (TextReply, lambda: ReplyWithCalls(DIALECTS["hermes"].new_parser((), call_id, True))):
        events, response = written(new_parser(), pieces)
        _, whole = written(new_parser(), [text])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (
            joined_items(events) == msgspec.to_builtins(response.output) == events[-1]["response"]["output"]
        )
        assert without_ids(response) == without_ids(whole)
        assert len(response.output) >= 1  # an answer without text is an empty message


def test_an_item_that_is_cut_off_is_not_complete() -> None:
    writer = ResponseWriter(new_response())
    parser = ReplyWithCalls(DIALECTS["hermes"].new_parser((), call_id, True))
    writer.read(feed_parser(parser, HERMES[: HERMES.index("ln")], False))
    writer.end("incomplete", Usage(1, 2, 3))
    message, call = writer.response.output
    assert (message.status, call.status) == ("completed", "incomplete")
    assert writer.response.status == "incomplete" and writer.response.completed_at is None


def test_openai_s_client_reads_calls_that_the_model_chose(replay: Replay) -> None:
    replay.text = HERMES
    tools: Any = [
        {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}},
        {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}},
    ]
    with (
        replay.serve(enable_auto_tool_choice=True, tool_call_parser="hermes") as url,
        openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client,
    ):
        response = client.responses.create(model="fake", input="Weather?", tools=tools)
        message, weather, clock = response.output
        assert response.output_text == "Let me see." and response.status == "completed"
        assert message.type == "message" and weather.type == clock.type == "function_call"
        assert (weather.name, json.loads(weather.arguments)) == ("get_weather", {"city": "Köln 🦊"})
        assert (clock.name, clock.arguments) == ("clock", "{}")
        with client.responses.stream(model="fake", input="Weather?", tools=tools) as stream:
            final = stream.get_final_response()
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
        assert final.output_text == "Let me see."
        replay.text = "It rains."
        outcome: Any = {"type": "function_call_output", "call_id": weather.call_id, "output": "Rain"}
        client.responses.create(model="fake", input=[outcome], previous_response_id=response.id, tools=tools)
        history = replay.prompt[replay.prompt.rindex('[{"role"') :]
        user, assistant, tool = json.loads(history.replace("<|im_end|>", ""))
        assert (user["role"], assistant["content"], tool["content"]) == ("user", "Let me see.", "Rain")
        assert [call["id"] for call in assistant["tool_calls"]] == [weather.call_id, clock.call_id]


# ---------------------------------------------------------------- the store


def test_the_store_is_bounded_and_drops_the_least_recently_used() -> None:
    items = read_input("x" * 1000)
    size = StoredResponse(new_response(), items).size()
    store = ResponseStore(3 * size + 10)
    for name in ("resp_1", "resp_2", "resp_3"):
        assert store.put(StoredResponse(new_response(name), items))
    store.get("resp_1")
    assert store.put(StoredResponse(new_response("resp_4"), items))
    assert store.num_bytes <= store.limit and len(store) == 3
    with pytest.raises(APIError, match="resp_2"):
        store.get("resp_2")
    assert store.get("resp_1").response.id == "resp_1"
    assert not store.put(StoredResponse(new_response("resp_5"), read_input("x" * 9000)))
    store.forget("resp_1")
    store.forget("resp_1")
    assert len(store) * size == store.num_bytes
    assert not ResponseStore(0).put(StoredResponse(new_response(), items))


def test_what_has_ended_is_given_back_as_it_was() -> None:
    items = read_input([{"role": "user", "content": "h\u00e9 \U0001f600"}])
    token = TokenLogprob(token="\u00e9", bytes=[195, 169], logprob=-0.25, top_logprobs=[])
    output: list[Item] = [
        ReasoningItem(id="rs_1", status="completed", content=[ReasoningText(text="hm")]),
        MessageItem(id="msg_1", status="completed", content=[OutputText(text="\u00e9", logprobs=[token])]),
        CallItem(id="fc_1", status="completed", call_id="call_1", name="clock", arguments='{"a": 1}'),
    ]
    fields: dict[str, Any] = {
        "status": "completed", "output": output, "tools": [{"type": "function", "name": "clock"}],
        "tool_choice": {"type": "function", "name": "clock"}, "metadata": {"a": "b"},
        "text": TextOptions(format=TextFormat("json_object")), "error": ResponseFailure("server_error", "lost"),
    }  # fmt: skip
    store, growing = ResponseStore(10_000), StoredResponse(new_response(**fields), items)
    size = growing.size()
    assert store.put(growing) and store.num_bytes == size
    ended = store.get("resp_1")
    assert ended.contents() == (new_response(**fields), items) and ended.response is not ended.response
    assert stored_items(store).item("fc_1") == msgspec.to_builtins(output[2])
    growing = StoredResponse(new_response("resp_2"), items)
    assert store.put(growing) and store.get("resp_2").response is growing.response  # the one that grows


def test_responses_in_progress_are_not_dropped() -> None:
    async def play() -> None:
        items = read_input("x" * 1000)
        store = ResponseStore(2 * StoredResponse(new_response(), items).size() + 10)
        busy = [StoredResponse(new_response(name), items) for name in ("resp_1", "resp_2")]
        for kept in busy:
            kept.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
            assert store.put(kept)
        assert not store.put(StoredResponse(new_response("resp_3"), items))
        assert store.get("resp_1") is busy[0] and store.get("resp_2") is busy[1]
        for kept in busy:
            assert kept.task is not None
            kept.task.cancel()
        await asyncio.wait([kept.task for kept in busy if kept.task is not None])
        assert store.put(StoredResponse(new_response("resp_3"), items))

    asyncio.run(play())


def test_failed_responses_are_not_continued() -> None:
    store = ResponseStore(10_000)
    store.put(StoredResponse(new_response("resp_1", status="failed"), read_input("a")))
    with pytest.raises(APIError, match="is failed"):
        stored_items(store).conversation("resp_1")
    assert stored_items(store).conversation(None) == []


def test_a_store_of_no_bytes_stores_nothing(serve: Callable[..., Client], core: FakeCore) -> None:
    core.auto = True
    client = serve(response_store_bytes=0)
    answer = client.post(PATH, {"input": "w5"})
    assert answer.status == 200 and answer.json["store"] is False
    assert client.get(f"{PATH}/{answer.json['id']}").status == 404
    assert client.post(PATH, {"input": "w5", "background": True}).error["code"] == "response_store_full"


# ---------------------------------------------------------------- errors during the generation


async def read_events(call: Call) -> list[Any]:
    """The events of a stream of /v1/responses, which ends without a mark."""
    *events, nothing = (await call.answer()).body.decode().split("\n\n")
    assert nothing == ""
    return [json.loads(event.split("\n")[1].removeprefix("data: ")) for event in events]


@pytest.fixture
def quiet(serve: Callable[..., Client], engine: AsyncLLM, core: FakeCore) -> Client:
    """A server on a core that answers only as the test says."""
    return serve()


def test_an_error_midway_is_an_event(quiet: Client, core: FakeCore) -> None:
    async def play() -> None:
        call = quiet.call("POST", PATH, {"input": "w5", "stream": True})
        request = (await asyncio.to_thread(core.expect, Submit)).requests[0]
        core.tokens(request.key, [2, 3])
        await call.message()  # the answer has begun
        core.tokens(request.key, [], finish_reason="error", error="it broke")
        (*_, text) = [message["body"] async for message in rest_of(call)]
        kinds = [line.removeprefix("event: ") for line in text.decode().splitlines() if line[:6] == "event:"]
        assert kinds[-1] == "response.failed"
        failed = json.loads(text.decode().strip().rpartition("data: ")[2])["response"]
        assert failed["status"] == "failed" and failed["error"] == {
            "code": "server_error",
            "message": "it broke",
        }
        assert (
            failed["output"][0]["content"][0]["text"] == "w2 w3"
            and failed["output"][0]["status"] == "incomplete"
        )

    quiet.run(play)


async def rest_of(call: Call) -> Any:
    """The messages that carry something, to the end."""
    more = True
    while more:
        message = await call.message()
        more = message.get("more_body", False)
        if message.get("body"):
            yield message


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_a_status(quiet: Client, core: FakeCore, stream: bool) -> None:
    async def play() -> None:
        call = quiet.call("POST", PATH, {"input": "w5", "stream": stream})
        request = (await asyncio.to_thread(core.expect, Submit)).requests[0]
        core.tokens(request.key, [], finish_reason="error", error="it broke")
        answer = await call.answer()
        assert answer.status == 500 and "it broke" in answer.error["message"]

    quiet.run(play)


def test_a_failure_in_the_background_is_stored(quiet: Client, core: FakeCore) -> None:
    async def play() -> None:
        call = quiet.call("POST", PATH, {"input": "w5", "background": True, "stream": True})
        request = (await asyncio.to_thread(core.expect, Submit)).requests[0]
        core.tokens(request.key, [], finish_reason="error", error="it broke")
        events = await read_events(call)
        assert [event["type"] for event in events] == [
            "response.created",
            "response.queued",
            "response.failed",
        ]
        name = events[0]["response"]["id"]
        kept = (await quiet.call("GET", f"{PATH}/{name}").answer()).json
        assert kept == events[-1]["response"] and kept["error"]["message"] == "it broke"
        again = await read_events(quiet.call("GET", f"{PATH}/{name}?stream=true&starting_after=1"))
        assert again == events[2:]
        assert (await quiet.call("GET", f"{PATH}/{name}?stream=true&starting_after=x").answer()).status == 400

    quiet.run(play)


def test_a_client_that_leaves_ends_its_response(quiet: Client, core: FakeCore) -> None:
    async def play() -> None:
        for stream in (False, True):
            call = quiet.call("POST", PATH, {"input": "w5", "stream": stream})
            await asyncio.to_thread(core.expect, Submit)
            call.hang_up()
            await call.task
            await asyncio.to_thread(core.expect, Abort)

    quiet.run(play)


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_aborts_on_the_engine(quiet: Client, core: FakeCore, stream: bool) -> None:
    async def play() -> None:
        call = quiet.call("POST", PATH, {"input": "w5", "background": True, "stream": stream})
        request = (await asyncio.to_thread(core.expect, Submit)).requests[0]
        name = request.request_id
        if stream:
            core.tokens(request.key, [2])
            while b"output_text.delta" not in (await call.message()).get("body", b""):
                pass
            kept = (await quiet.call("GET", f"{PATH}/{name}").answer()).json
            assert kept["status"] == "in_progress" and kept["output"][0]["content"][0]["text"] == "w2"
        answer = (await quiet.call("POST", f"{PATH}/{name}/cancel").answer()).json
        assert answer["status"] == "cancelled"
        assert [item["status"] for item in answer["output"]] == ["incomplete"] * stream
        assert answer["usage"]["output_tokens"] == int(stream)
        await asyncio.to_thread(core.expect, Abort)
        follow = await quiet.call("POST", PATH, {"input": "w5", "previous_response_id": name}).answer()
        assert follow.status == 400 and "cancelled" in follow.error["message"]

    quiet.run(play)


# ---------------------------------------------------------------- errors, and counts before there is an answer

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input"),
        ({"input": "w5", "text": {"format": {"type": "json_schema"}}}, "text", "text.format needs a schema"),
        ({"input": "w5", "min_tokens": 9, "max_output_tokens": 5}, "min_tokens", "max_output_tokens=5"),
        ({"input": "w5", "top_logprobs": 21}, "top_logprobs", "top_logprobs=21"),
        ({"input": "w5", "top_logprobs": -5}, "top_logprobs", "top_logprobs"),
        ({"input": "w5", "tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name"),
        (
            {"input": "w5", "tools": [TOOL | {"parameters": {"type": "string"}}]},
            "tools",
            "tools[0].parameters",
        ),
        (
            {"input": "w5", "tools": [TOOL], "tool_choice": "any"},
            "tool_choice",
            "{'type': 'function', 'name'",
        ),
        (
            {"input": "w5", "tools": [TOOL], "tool_choice": {"type": "function", "name": 3}},
            "tool_choice",
            "got {'type': 'function', 'name': 3}",
        ),
        (
            {
                "input": "w5",
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice",
            "no tool 'g', only f",
        ),
        ({"input": "w5 " * 5000}, "input", "This model's maximum context length is 4096 tokens"),
        ({"input": "w5", "priority": 3}, "priority", "priority=3 has no effect"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_fields_of_responses(
    client: Client, body: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    answer = client.post(PATH, body | {"stream": stream})
    assert answer.status == 400, answer.body
    assert message in answer.error["message"]
    for other in ("messages", "max_tokens", "max_completion_tokens", "response_format", "'function': {"):
        assert other not in answer.error["message"]
    assert answer.error["param"] in (param, None)
    assert answer.error["param"] is not None or param == "input"


def test_counting_input_tokens(client: Client, core: FakeCore) -> None:
    path = PATH + "/input_tokens"
    answer = client.post(path, {"model": "fake", "input": "w5 w6", "instructions": "w7"})
    assert answer.json == {"object": "response.input_tokens", "input_tokens": 3}
    assert not core.submitted
    first = client.post(PATH, {"input": "w5 w6"}).json
    follow = {"input": [{"role": "user", "content": "w8"}], "previous_response_id": first["id"]}
    assert (
        client.post(path, follow).json["input_tokens"]
        == client.post(PATH, follow).json["usage"]["input_tokens"]
    )
    for body, status, param in (
        ({}, 400, "input"),
        ({"input": "w5", "previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ({"input": "w5", "tools": [TOOL], "tool_choice": "any"}, 400, "tool_choice"),
        ({"input": 5}, 422, "input"),
    ):
        answer = client.post(path, body)
        assert (answer.status, answer.error["param"]) == (status, param)


def test_ids_are_of_openai_s_form(client: Client) -> None:
    answer = client.post(PATH, {"input": "w5"}, **{"x-request-id": "mine"})
    assert answer.json["id"].startswith("resp_mine-")
    assert client.get(f"{PATH}/{answer.json['id']}").json == answer.json
    (item,) = answer.json["output"]
    assert item["id"].startswith("msg_")


# ---------------------------------------------------------------- references to items


def test_items_are_referred_to(client: Client, core: FakeCore) -> None:
    """By clients that trust in the store; what is not stored any more must be sent."""
    first = client.post(PATH, {"input": "w5 w6"}).json
    (asked,) = client.get(f"{PATH}/{first['id']}/input_items").json["data"]
    references = [{"type": "item_reference", "id": name} for name in (asked["id"], first["output"][0]["id"])]
    question = {"role": "user", "content": "w7"}
    second = client.post(PATH, {"input": [*references, question]}).json
    whole = client.post(PATH, {"input": [question], "previous_response_id": first["id"]}).json
    prompts = [core.submitted[key].prompt.token_ids for key in sorted(core.submitted)]
    assert prompts[1] == prompts[2] == [5, 6, 2, 3, 4, 7]
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    for response in (first, second):
        assert client.post(PATH, {"input": [references[1], question]} | {"store": False}).status == 200
        client.request("DELETE", f"{PATH}/{response['id']}")
    answer = client.post(
        PATH, {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}, question]}
    )
    assert (answer.status, answer.error["param"]) == (404, "input")
    assert client.post(PATH, {"input": [{"type": "item_reference"}]}).status == 400


def test_a_store_forgets_items_with_their_response() -> None:
    store = ResponseStore(100_000)
    items = read_input([{"role": "user", "content": "a", "id": "mine"}])
    for name in ("resp_1", "resp_2"):
        store.put(StoredResponse(new_response(name), items))
    store.forget("resp_1")
    assert stored_items(store).item("mine") == items[0]
    store.forget("resp_2")
    assert stored_items(store).item("mine") is None


def test_each_response_that_a_request_refers_to_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all where they are larger together than a request may be."""
    items = read_input([{"role": "user", "content": "a", "id": str(number)} for number in range(100)])
    store, decoded = ResponseStore(100_000), []
    first, second = new_response("resp_1", status="completed"), new_response("resp_2", status="completed")
    second.previous_response_id = "resp_1"
    for response in (first, second):
        store.put(StoredResponse(response, items))
    real = StoredResponse.contents
    monkeypatch.setattr(StoredResponse, "contents", lambda self: decoded.append(self.id) or real(self))
    found = stored_items(store)
    assert [found.item(str(number)) for number in range(100)] == items
    assert found.conversation("resp_2") == items + items
    assert sorted(decoded) == ["resp_1", "resp_2"]
    small = stored_items(store, store.num_bytes * 3 // 4)
    assert small.item("5") == items[5]
    with pytest.raises(APIError, match="refers to have over") as caught:
        small.conversation("resp_2")
    assert caught.value.status == 413 and decoded[2:] == ["resp_2"]


def test_an_item_is_referred_to_once() -> None:
    with pytest.raises(APIError, match="the item 'a' is referred to twice"):
        read_input([{"type": "item_reference", "id": name} for name in "abac"], lambda name: {"id": name})


@pytest.mark.timeout(20)
def test_items_of_one_id_are_forgotten_at_once() -> None:
    """Clients choose the ids of their input, also the same one for all of it."""
    store = ResponseStore(100 << 20)
    items = read_input([{"type": "reasoning", "id": "x"}] * 16384)
    names = [f"resp_{number}" for number in range(8)]
    for name in names:
        store.put(StoredResponse(new_response(name, status="completed"), items))
    for name in names:
        store.forget(name)
    assert stored_items(store).item("x") is None


def stored_items(store: ResponseStore, max_bytes: int = 1 << 20) -> StoredItems:
    return StoredItems(store, "", max_bytes)
