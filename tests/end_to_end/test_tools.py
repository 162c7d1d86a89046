"""Calls that are demanded of a real model: whatever it would say, it makes them, and they follow the schemas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.end_to_end.http_server import Server

BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "pages": {"$ref": "#/$defs/count"},
        "kind": {"enum": ["novel", "guide"]},
        "sequel": {"$ref": "#"},
    },
    "required": ["title", "pages", "kind"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 900}},
}
ROOM = {
    "type": "object",
    "properties": {"nights": {"$ref": "#/$defs/count"}},
    "required": ["nights"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 3}},
}
SCHEMAS = {"book": BOOK, "room": ROOM}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "book"}}
ASK: list[Any] = [{"role": "user", "content": "Find me a book about the with statement."}]
SAME: Any = {"model": "demo", "messages": ASK, "tools": TOOLS, "temperature": 0.9, "max_tokens": 200}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check_calls(choice: Any) -> int:
    """How many calls a choice has, all of which follow their schemas; unless they were cut short."""
    calls = choice.message.tool_calls
    assert choice.message.content is None and calls
    assert choice.finish_reason in ("tool_calls", "length")
    whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]
    for call in whole:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return len(whole)


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_demanded_calls_follow_their_schemas(client: openai.OpenAI, choice: Any) -> None:
    seen = 0
    for seed in range(10):
        answer = client.chat.completions.create(**SAME, tool_choice=choice, seed=seed, n=2)
        seen += sum(check_calls(each) for each in answer.choices)
    assert seen >= 6


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_streams_say_the_same(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(3):
        whole = client.chat.completions.create(**SAME, tool_choice=choice, seed=seed).choices[0]
        calls, reason = [], None
        for chunk in client.chat.completions.create(**SAME, tool_choice=choice, seed=seed, stream=True):
            assert chunk.choices[0].delta.content is None
            reason = chunk.choices[0].finish_reason
            for call in chunk.choices[0].delta.tool_calls or ():
                if call.index == len(calls):
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments
        assert calls == [[call.function.name, call.function.arguments] for call in whole.message.tool_calls]
        assert reason == whole.finish_reason


def test_the_stream_of_the_client_library(client: openai.OpenAI) -> None:
    chosen: Any = {"type": "function", "function": {"name": "room"}}
    done = []
    with client.chat.completions.stream(**SAME, tool_choice=chosen, seed=1) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                done.append(event.arguments)
        (final,) = stream.get_final_completion().choices
    check_calls(final)
    assert [call.function.arguments for call in final.message.tool_calls or ()] == done


def test_one_call_if_no_more_are_wanted(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.create(
            **SAME, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert len(answer.choices[0].message.tool_calls or ()) == 1


def test_the_async_client(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> tuple[Any, str]:
        whole = await client.chat.completions.create(**SAME, tool_choice=NAMED, seed=seed)
        arguments = ""
        async for chunk in await client.chat.completions.create(
            **SAME, tool_choice=NAMED, seed=seed, stream=True
        ):
            for call in chunk.choices[0].delta.tool_calls or ():
                arguments += call.function.arguments or "" if call.function else ""
        return whole.choices[0], arguments

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for choice, arguments in await asyncio.gather(*(ask(client, seed) for seed in range(4))):
                check_calls(choice)
                assert choice.message.tool_calls[0].function.arguments == arguments

    asyncio.run(main())


def test_schemas_that_cannot_be_followed_are_refused(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "if": 3}}}
    for choice in ({"type": "function", "function": {"name": "f"}}, "required"):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="demo", messages=ASK, tools=[tool], tool_choice=choice)  # type: ignore[call-overload]
