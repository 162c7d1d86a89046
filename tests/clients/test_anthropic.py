"""/v1/messages as Anthropic's own client sees it: answers, streams, rounds of tools, reasoning, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.scripts import ANSWER, TRIP, get_weather

ASK: list[Any] = [{"role": "user", "content": "What is the with statement?"}]
# This client's newest models take no temperature; servers of other models do.
GREEDY: Any = {"model": "demo", "messages": ASK, "max_tokens": 24, "extra_body": {"temperature": 0}}
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    """A short greedy answer."""
    return client.messages.create(**GREEDY | fields)


def test_a_stream_says_what_an_answer_says(client: anthropic.Anthropic) -> None:
    whole = ask(client, system="Be brief.", metadata={"user_id": "u"})
    assert (whole.type, whole.role, whole.model, whole.stop_reason) == (
        "message",
        "assistant",
        "demo",
        "max_tokens",
    )
    (block,) = whole.content
    assert block.type == "text" and block.text
    assert whole.usage.output_tokens == 24 and whole.usage.input_tokens > 0
    with client.messages.stream(**GREEDY, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 24
    used = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(model="demo", messages=ASK, system="Be brief.").input_tokens == used
    again = ask(client, system="Be brief.")
    assert (again.usage.cache_read_input_tokens or 0) + again.usage.input_tokens == used


def test_an_answer_goes_on_where_the_last_message_ends(client: anthropic.Anthropic) -> None:
    whole = ask(client).content[0].text
    begun, *_ = whole.rsplit(" ", 8)  # between two tokens
    rest = ask(client, messages=[*ASK, {"role": "assistant", "content": begun}], max_tokens=4).content[0].text
    assert rest and whole.removeprefix(begun).startswith(rest)


def called(client: anthropic.Anthropic, streams: bool, **fields: Any) -> Any:
    """A message whose call is whole: the demo model writes white space until it is cut, with some seeds."""
    for seed in range(20):
        given: Any = {"model": "demo", "max_tokens": 100, "tools": [TOOL]} | fields
        given["extra_body"] = {"temperature": 0.9, "seed": seed}
        if streams:
            with client.messages.stream(**given) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(**given)
        if message.stop_reason == "tool_use":
            return message
    raise AssertionError("no seed gives a whole call")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_two_rounds_of_tools(client: anthropic.Anthropic, streams: bool, choice: Any) -> None:
    messages = list(ASK)
    for _ in range(2):
        one = choice | {"disable_parallel_tool_use": True}
        message = called(client, streams, messages=messages, tool_choice=one)
        (call,) = message.content
        assert call.type == "tool_use" and call.name == "get_weather"
        assert call.input["city"] in ("Oslo", "Rome") and 1 <= call.input["days"] <= 9
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert (
        ask(client, messages=messages, tools=[TOOL], tool_choice={"type": "none"}).content[0].type == "text"
    )
    assert ask(client, messages=messages, tools=[TOOL]).role == "assistant"  # auto


def test_reasoning_is_a_block_that_comes_back(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(**GREEDY, thinking=thinking) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    (block,) = message.content  # the demo model never ends its reasoning
    assert block.type == "thinking" and block.thinking and block.signature
    assert {"thinking", "signature", "message_stop"} <= kinds
    turns: Any = [*ASK, {"role": "assistant", "content": message.content}, ASK[0]]
    with_thought = client.messages.count_tokens(model="demo", messages=turns).input_tokens
    turns[1] = {"role": "assistant", "content": "x"}
    assert with_thought > client.messages.count_tokens(model="demo", messages=turns).input_tokens


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.lifecycle) == ("demo", "model", "active")
    assert model.max_input_tokens and client.models.retrieve("demo") == model
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        client.models.retrieve("claude")


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_runner_has_two_rounds(scripted: str, streams: bool) -> None:
    with anthropic.Anthropic(base_url=scripted, api_key="none", max_retries=0) as client:
        runner: Any = client.beta.messages.tool_runner(
            model="demo",
            max_tokens=200,
            messages=[{"role": "user", "content": TRIP}],
            tools=[anthropic.beta_tool(get_weather)],
            stream=streams,
        )
        messages = [turn.get_final_message() if streams else turn for turn in runner]
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use", "end_turn"]
    assert messages[-1].content[0].text == ANSWER


def test_errors_are_the_client_s_own(client: anthropic.Anthropic) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="no pictures"):
        ask(client, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        client.models.retrieve("claude")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(client, system="word " * 5000)
