"""Pydantic AI: agents with tools and typed answers, over chat completions and over responses.

Its class for Anthropic's API fails with the newest package `anthropic`, before it sends anything.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.scripts import ANSWER, TRIP, call, get_weather, script

KINDS = ["chat", "responses"]


class Forecast(pydantic.BaseModel):
    """A forecast."""

    city: Literal["Oslo", "Rome"]
    rains: bool


def model_on(kind: str, url: str) -> Any:
    """A model of Pydantic AI's on a server."""
    model = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
    return model("demo", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_has_two_rounds_of_tools(scripted: str, kind: str) -> None:
    agent = Agent(model_on(kind, scripted), tools=[get_weather], instructions="Be brief.")
    result = agent.run_sync(TRIP)
    assert result.output == ANSWER and result.usage.requests == 3

    async def streamed() -> list[str]:
        async with agent.run_stream(TRIP) as run:
            return [delta async for delta in run.stream_text(delta=True, debounce_by=None)]

    parts = asyncio.run(streamed())
    assert len(parts) > 1 and "".join(parts) == ANSWER


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_answers_with_a_type(scripted: str, kind: str) -> None:
    model, first = model_on(kind, scripted), call("get_weather", city="Oslo")
    by_tool: Any = Agent(model, tools=[get_weather], output_type=ToolOutput(Forecast, name="forecast"))
    question = script("Where does it rain?", first, call("forecast", city="Oslo", rains=True))
    assert by_tool.run_sync(question).output == Forecast(city="Oslo", rains=True)
    native: Any = Agent(model, tools=[get_weather], output_type=NativeOutput(Forecast))
    question = script("Where does it rain?", first, '{"city": "Oslo", "rains": true}')
    assert native.run_sync(question).output == Forecast(city="Oslo", rains=True)
