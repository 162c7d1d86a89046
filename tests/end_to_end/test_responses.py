"""/v1/responses on the demo model, as OpenAI's own client sees it, in both its forms."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.frontend.server.http.test_websocket import Peer, create

STORE_BYTES = 200_000
QUESTION = "What is the with statement?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Verdict(BaseModel):
    """What a structured answer is parsed into."""

    word: Literal["yes", "no"]
    certain: bool


@pytest.fixture(scope="module")
def url(address: str) -> Iterator[str]:
    command = [sys.executable, "-m", "pagewire.cli.main", "serve", "--attach", address, "--port", "0"]
    more = ["--response-store-bytes", str(STORE_BYTES)]
    process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    word, _, found = process.stdout.readline().strip().partition(" ")
    assert word == "ready"
    yield found
    process.terminate()
    process.stdout.close()
    assert process.wait(60) == 0


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Response:
    """A short greedy answer."""
    given = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 24} | fields
    response: Response = client.responses.create(**given)
    return response


def refused(client: openai.OpenAI, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as found:
        ask(client, **fields)
    return found.value


def chat(client: openai.OpenAI, *messages: tuple[str, str], **fields: Any) -> Any:
    asked: Any = [{"role": role, "content": content} for role, content in messages]
    given: Any = {"model": "demo", "messages": asked, "temperature": 0, "max_completion_tokens": 24} | fields
    return client.chat.completions.create(**given).choices[0].message.content


# ---------------------------------------------------------------- create


def test_a_response_says_what_a_chat_completion_says(client: openai.OpenAI) -> None:
    response = ask(client, instructions="Be brief.", metadata={"a": "b"}, user="u")
    assert response.output_text == chat(client, ("system", "Be brief."), ("user", QUESTION))
    assert response.id.startswith("resp") and response.object == "response"
    assert response.status == "incomplete"
    assert (
        response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    )
    (message,) = response.output
    assert message.type == "message" and message.status == "incomplete" and message.role == "assistant"
    assert response.usage is not None
    assert response.usage.output_tokens == 24
    assert response.usage.total_tokens == response.usage.input_tokens + 24
    assert (response.temperature, response.top_p, response.instructions) == (0, 1, "Be brief.")
    assert (response.metadata, response.store, response.background) == ({"a": "b"}, True, False)
    whole = ask(client, max_output_tokens=400)
    assert whole.status == "completed" and whole.incomplete_details is None and whole.error is None
    again = ask(client, max_output_tokens=400)
    assert again.output_text == whole.output_text
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 0


def test_input_is_text_or_messages_in_any_form(client: openai.OpenAI) -> None:
    forms: list[Any] = [
        [{"role": "user", "content": QUESTION}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
    ]
    expected = ask(client).output_text
    assert [ask(client, input=form).output_text for form in forms] == [expected] * 2
    told = ask(client, input=[{"role": "developer", "content": "Be brief."}, forms[0][0]])
    assert told.output_text == ask(client, instructions="Be brief.").output_text
    answer = {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "A statement.", "annotations": []}],
    }
    longer = ask(client, input=[*forms[0], answer, {"role": "user", "content": "Which?"}])
    assert longer.output_text == chat(
        client, ("user", QUESTION), ("assistant", "A statement."), ("user", "Which?")
    )


def test_sampling_follows_the_seed(client: openai.OpenAI) -> None:
    same = [ask(client, temperature=1.0, extra_body={"seed": 5, "top_k": 20}).output_text for _ in range(2)]
    assert same[0] == same[1] != ask(client, temperature=1.0, extra_body={"seed": 6}).output_text


def test_log_probabilities_come_when_asked_for(client: openai.OpenAI) -> None:
    response = ask(client, include=["message.output_text.logprobs"], top_logprobs=3, max_output_tokens=5)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text" and part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [3] * 5
    assert all(entry.token == entry.top_logprobs[0].token for entry in part.logprobs)
    with client.responses.stream(
        model="demo", input=QUESTION, temperature=0, max_output_tokens=5, top_logprobs=3
    ) as stream:
        told = [
            entry
            for event in stream
            if event.type == "response.output_text.delta"
            for entry in event.logprobs
        ]
    assert [entry.token for entry in told] == [entry.token for entry in part.logprobs]


# ---------------------------------------------------------------- streams


def test_a_stream_tells_the_same_in_the_right_order(client: openai.OpenAI) -> None:
    whole = ask(client, max_output_tokens=400)
    events: Any = list(
        client.responses.create(
            model="demo", input=QUESTION, temperature=0, max_output_tokens=400, stream=True
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"} and len(kinds) > 12
    text = "".join(event.delta for event in events[4:-4])
    assert text == events[-4].text == events[-3].part.text == whole.output_text
    assert events[0].response.output == [] and events[0].response.status == "in_progress"
    final = events[-1].response
    assert final.output_text == text and final.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]
    assert {event.item_id for event in events[3:-2]} == {final.output[0].id}


def test_the_helper_for_streams_puts_them_together(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="demo", input=QUESTION, temperature=0, max_output_tokens=400
    ) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1] == ask(client, max_output_tokens=400).output_text
    with client.responses.stream(model="demo", input=QUESTION, temperature=0, max_output_tokens=4) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None


def test_a_stream_that_is_left_frees_its_blocks(client: openai.OpenAI, url: str) -> None:
    stream = client.responses.create(
        model="demo", input=QUESTION, max_output_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until_idle(url)


def fetch(url: str, method: str = "GET") -> tuple[int, str]:
    """Status and text."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until_idle(url: str) -> None:
    """Until nothing runs on the engine."""
    running = None
    while running != 0:
        lines = fetch(url + "/metrics")[1].splitlines()
        (line,) = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        running = float(line.rpartition(" ")[2])


# ---------------------------------------------------------------- structured output and tools


def test_structured_answers_are_parsed(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="demo", input="Yes or no?", text_format=Verdict, temperature=1.0)
    assert isinstance(response.output_parsed, Verdict)
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema"
    with client.responses.stream(model="demo", input="Yes or no?", text_format=Verdict) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_response().output_parsed, Verdict)
    form: Any = {"format": {"type": "json_object"}}
    text = ask(client, text=form, max_output_tokens=200, extra_body={"seed": 1}).output_text
    assert text.lstrip().startswith("{")


def test_a_demanded_call_is_made_and_answered(client: openai.OpenAI) -> None:
    choices: list[Any] = [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ]
    other: Any = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
    for choice in choices:
        tools = [WEATHER, other] if isinstance(choice, dict) else [WEATHER]
        response = ask(
            client, tools=tools, tool_choice=choice, max_output_tokens=300, parallel_tool_calls=False
        )
        (call,) = response.output
        assert call.type == "function_call" and call.name == "get_weather" and call.status == "completed"
        assert response.tool_choice is not None and len(response.tools) == len(tools)
    parsed = client.responses.parse(
        model="demo", input="Weather?", tools=[WEATHER], tool_choice=choices[1], temperature=1.0
    )
    (call,) = parsed.output
    assert call.type == "function_call"
    arguments: Any = call.parsed_arguments
    assert arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 9
    outcome: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    follow = ask(client, previous_response_id=parsed.id, input=[outcome])
    by_hand: list[Any] = [{"role": "user", "content": "Weather?"}, call.to_dict(), outcome]
    by_hand[1].pop("parsed_arguments", None)
    assert follow.output_text == ask(client, input=by_hand).output_text
    error = refused(client, input=[{**outcome, "call_id": "call_of_nobody"}])
    assert error.status_code == 400 and "call_of_nobody" in str(error)


def test_a_streamed_call_tells_its_arguments_as_they_come(client: openai.OpenAI) -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}}
    with client.responses.stream(model="demo", input="Weather?", temperature=0, **fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[2] == "output_item.added" and kinds[-3:] == [
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (call,) = final.output
    assert call.type == "function_call"
    assert "".join(pieces) == call.arguments  # in one piece where a busy machine has let them gather
    (whole,) = ask(client, input="Weather?", max_output_tokens=None, **fields).output
    assert whole.type == "function_call" and whole.arguments == call.arguments


# ---------------------------------------------------------------- conversations that are kept


def test_a_response_is_continued_fetched_and_deleted(client: openai.OpenAI) -> None:
    first = ask(client, instructions="Be brief.")
    second = ask(client, input="Which?", previous_response_id=first.id)
    third = ask(client, input="And?", previous_response_id=second.id, store=False)
    turns = [("user", QUESTION), ("assistant", first.output_text), ("user", "Which?")]
    assert second.output_text == chat(client, *turns)  # without the instructions of the first
    assert third.output_text == chat(client, *turns, ("assistant", second.output_text), ("user", "And?"))
    assert third.store is False and second.previous_response_id == first.id
    assert client.responses.retrieve(second.id) == second
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [(item.type, item.role) for item in items] == [("message", "user")]  # type: ignore[union-attr]
    client.responses.delete(first.id)
    for name in (first.id, third.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
    error = refused(client, previous_response_id=second.id)
    assert error.status_code == 404 and first.id in str(error)


def test_what_is_kept_is_bounded_and_the_oldest_goes(client: openai.OpenAI) -> None:
    first = ask(client, max_output_tokens=1)
    used = ask(client, max_output_tokens=1)
    ballast = "word " * 4000
    for number in range(2 * STORE_BYTES // len(ballast)):
        assert client.responses.retrieve(used.id).id == used.id
        last = ask(client, max_output_tokens=1, input=[{"role": "user", "content": "a"}], metadata={},
                   tools=[{**WEATHER, "description": f"{number} {ballast}"}], tool_choice="none")  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(last.id).id == last.id


def test_old_turns_are_left_out_when_truncation_says_so(client: openai.OpenAI) -> None:
    turns: list[Any] = []
    for number in range(60):
        turns += [
            {"role": "user", "content": f"Question {number}: " + "of the statement " * 6},
            {"role": "assistant", "content": "The statement."},
        ]
    last = {"role": "user", "content": QUESTION}
    error = refused(client, input=[*turns, last])
    assert error.status_code == 400 and error.code == "context_length_exceeded"
    response = ask(client, input=[*turns, last], truncation="auto", instructions="Be brief.")
    assert response.usage is not None
    room = 1024 - 24
    for kept in range(60, 0, -1):  # the longest end of the conversation that fits
        try:
            by_hand = ask(client, input=[*turns[-2 * kept :], last], instructions="Be brief.")
        except openai.BadRequestError:
            continue
        if by_hand.usage is not None and by_hand.usage.input_tokens <= room:
            break
    assert by_hand.usage is not None and by_hand.usage.input_tokens == response.usage.input_tokens
    assert by_hand.output_text == response.output_text
    short = ask(client, truncation="auto")
    assert short.output_text == ask(client).output_text


# ---------------------------------------------------------------- background


def test_a_response_is_made_in_the_background(client: openai.OpenAI) -> None:
    queued = ask(client, background=True, max_output_tokens=60)
    assert queued.status == "queued" and queued.background and queued.output == []
    while (response := client.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
        pass
    assert response.status == "incomplete"
    assert response.output_text == ask(client, max_output_tokens=60).output_text
    assert client.responses.cancel(queued.id).status == "incomplete"  # too late


def test_a_response_in_the_background_is_cancelled(client: openai.OpenAI, url: str) -> None:
    endless: Any = {"max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
    queued = ask(client, background=True, **endless)
    cancelled = client.responses.cancel(queued.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(queued.id) == cancelled
    wait_until_idle(url)
    gone = ask(client, background=True, **endless)
    client.responses.delete(gone.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(ask(client, max_output_tokens=1).id)


def test_a_stream_in_the_background_outlives_its_connection(client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 100}
    stream = client.responses.create(**fields, background=True, stream=True)
    first: Any = next(iter(stream))
    stream.close()
    assert first.response.status == "queued"
    rest: Any = list(client.responses.retrieve(first.response.id, stream=True, starting_after=0))
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    assert [event.type for event in rest[:2]] == ["response.queued", "response.in_progress"]
    assert rest[-1].response.output_text == ask(client, max_output_tokens=100).output_text
    assert list(client.responses.retrieve(first.response.id, stream=True))[1:] == rest
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(ask(client, max_output_tokens=1).id, stream=True)


# ---------------------------------------------------------------- a WebSocket


def test_a_websocket_has_the_answers_of_http(client: openai.OpenAI, url: str) -> None:
    """Also of a second turn, whose first one was warmed up, and which nothing but the connection knows."""
    first = ask(client)
    second = ask(client, input="Why?", previous_response_id=first.id)
    fields = {"model": "demo", "temperature": 0, "max_output_tokens": 24, "store": False}
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60) as connected:
        peer = Peer(connected)
        peer.send(create(**fields, input=QUESTION, generate=False))
        warm = peer.events()[-1]["response"]
        peer.send(create(**fields, input=[], previous_response_id=warm["id"]))
        answers = [peer.events()[-1]["response"]]
        peer.send(create(**fields, input="Why?", previous_response_id=answers[0]["id"]))
        answers.append(peer.events()[-1]["response"])
        peer.close()
    texts = ["".join(part["text"] for item in each["output"] for part in item["content"]) for each in answers]
    assert texts == [first.output_text, second.output_text]
    assert [each["usage"]["input_tokens"] for each in answers] == [
        each.usage.input_tokens for each in (first, second) if each.usage is not None
    ]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input is empty"),
        ({"input": [{"type": "robot_call", "id": "x"}]}, "input[0].type must be one of"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input_image",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "the server has no web_search",
        ),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"include": ["everything"]}, "everything"),
        ({"prompt": {"id": "p"}}, "prompt is not supported"),
        ({"background": True, "store": False}, "background needs store"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 99}, "logprobs"),
        ({"background": True, "input": "word " * 2000}, "max_model_len"),
    ],
)
def test_unsupported_fields_are_refused_by_name(client: openai.OpenAI, fields: Any, message: str) -> None:
    error = refused(client, **fields)
    assert error.status_code == 400
    assert message in str(error)


def test_other_mistakes_have_statuses_of_their_own(client: openai.OpenAI, url: str) -> None:
    assert refused(client, previous_response_id="resp_0").code == "previous_response_not_found"
    assert refused(client, input=5).status_code == 422
    assert refused(client, input=[{"type": "item_reference", "id": "msg_0"}]).status_code == 404
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        status, text = fetch(f"{url}/v1/responses/resp_0{path}", method)
        assert (status, json.loads(text)["error"]["code"]) == (404, "not_found")


# ---------------------------------------------------------------- the asynchronous client


def test_the_asynchronous_client_does_the_same(url: str) -> None:
    asyncio.run(use_asynchronously(url))


async def use_asynchronously(url: str) -> None:
    fields: Any = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 400}
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        whole = await client.responses.create(**fields)
        async with client.responses.stream(**fields) as stream:
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text
        parsed = await client.responses.parse(model="demo", input="Yes or no?", text_format=Verdict)
        assert isinstance(parsed.output_parsed, Verdict)
        queued = await client.responses.create(**fields, background=True)
        await client.responses.cancel(queued.id)
        assert (await client.responses.retrieve(queued.id)).status in ("cancelled", "completed")
