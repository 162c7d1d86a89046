"""OpenAI's client where agents need it: rounds of tools in chat completions and in responses, and types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.clients.scripts import ANSWER, TRIP, call, get_weather, script

PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


class Forecast(pydantic.BaseModel):
    """A forecast."""

    city: Literal["Oslo", "Rome"]
    rains: bool


@pytest.fixture(scope="module")
def client(scripted: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=scripted + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_two_rounds_of_tools_in_chat(client: openai.OpenAI) -> None:
    function: Any = {"name": "get_weather", "parameters": PARAMETERS, "strict": True}
    messages: list[Any] = [{"role": "user", "content": TRIP}]
    for _ in range(3):
        tools: Any = [{"type": "function", "function": function}]
        with client.chat.completions.stream(model="demo", messages=messages, tools=tools) as stream:
            kinds = [event.type for event in stream]
            message: Any = stream.get_final_completion().choices[0].message
        messages.append(message.to_dict())
        for tool_call in message.tool_calls or ():
            assert "tool_calls.function.arguments.done" in kinds
            result = get_weather(**json.loads(tool_call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": result})
    assert message.content == ANSWER and kinds.count("content.delta") > 1


@pytest.mark.parametrize("stored", [False, True])
def test_two_rounds_of_tools_in_responses(client: openai.OpenAI, stored: bool) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}]
    items: list[Any] = [{"role": "user", "content": TRIP}]
    previous: Any = openai.omit
    for _ in range(3):
        fields: Any = {"model": "demo", "input": items, "tools": tools, "store": stored}
        with client.responses.stream(**fields, previous_response_id=previous) as stream:
            for _event in stream:
                pass
            response = stream.get_final_response()
        if stored:
            items, previous = [], response.id
        else:
            items += [item.to_dict() for item in response.output]
        for item in response.output:
            if item.type == "function_call":
                result = get_weather(**json.loads(item.arguments))
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    assert response.output_text == ANSWER and response.status == "completed"


def test_two_rounds_of_tools_over_a_websocket(client: openai.OpenAI) -> None:
    """Each turn sends what is new; nothing is stored, and the connection alone knows what was before."""
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}]
    items: list[Any] = [{"role": "user", "content": TRIP}]
    previous: Any = {"generate": False}
    with client.responses.connect() as connection:
        for turn in range(4):
            fields: Any = {"model": "demo", "input": items, "tools": tools, "store": False}
            connection.send({"type": "response.create", **fields, **previous})
            kinds: list[str] = []
            while not kinds or kinds[-1] != "response.completed":
                event: Any = connection.recv()
                assert event.type != "error", event
                kinds.append(event.type)
            response, items = event.response, []
            previous = {"previous_response_id": response.id}
            assert kinds[0] == "response.created" and bool(response.output) == (turn > 0)
            for item in response.output:
                if item.type == "function_call":
                    result = get_weather(**json.loads(item.arguments))
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
        assert response.output_text == ANSWER
        connection.send({"type": "response.create", "previous_response_id": "resp_none", "input": "a"})
        event = connection.recv()
        assert (event.type, event.status, event.error["code"]) == (
            "error",
            404,
            "previous_response_not_found",
        )
    with client.responses.connect() as connection:
        connection.send({"type": "response.create", "input": "a", **previous})
        event = connection.recv()
        assert event.error["code"] == "previous_response_not_found"


def test_answers_have_types(client: openai.OpenAI) -> None:
    question = script("Where does it rain?", '{"city": "Oslo", "rains": true}')
    messages: Any = [{"role": "user", "content": question}]
    parsed = client.chat.completions.parse(model="demo", messages=messages, response_format=Forecast)
    assert parsed.choices[0].message.parsed == Forecast(city="Oslo", rains=True)
    response = client.responses.parse(model="demo", input=question, text_format=Forecast)
    assert response.output_parsed == Forecast(city="Oslo", rains=True)


def test_a_named_tool_and_its_arguments_have_types(client: openai.OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(Forecast, name="forecast")
    messages: Any = [
        {"role": "user", "content": script("Where?", call("forecast", city="Rome", rains=False))}
    ]
    for choice in ("required", {"type": "function", "function": {"name": "forecast"}}):
        chosen: Any = choice
        answer = client.chat.completions.parse(
            model="demo", messages=messages, tools=[tool], tool_choice=chosen
        )
        (found,) = answer.choices[0].message.tool_calls or ()
        assert found.function.parsed_arguments == Forecast(city="Rome", rains=False)
