"""OpenAI's Agents SDK over chat completions and over responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai.types.responses import ResponseTextDeltaEvent

from tests.clients.scripts import ANSWER, TRIP, call, get_weather, script

set_tracing_disabled(True)
MODELS: Any = [OpenAIChatCompletionsModel, OpenAIResponsesModel]


class Forecast(pydantic.BaseModel):
    """A forecast."""

    city: Literal["Oslo", "Rome"]
    rains: bool


def agent_on(kind: Any, url: str, **fields: Any) -> Agent[None]:
    """An agent with a tool."""
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    model = kind(model="demo", openai_client=client)
    return Agent(
        "forecaster", instructions="Be brief.", model=model, tools=[function_tool(get_weather)], **fields
    )


@pytest.mark.parametrize("kind", MODELS)
def test_two_rounds_of_tools(scripted: str, kind: Any) -> None:
    async def run() -> tuple[str, str, str]:
        agent = agent_on(kind, scripted)
        whole = await Runner.run(agent, TRIP)
        streamed, text = Runner.run_streamed(agent, TRIP), ""
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
                text += event.data.delta
        return whole.final_output, streamed.final_output, text

    assert asyncio.run(run()) == (ANSWER, ANSWER, ANSWER)


@pytest.mark.parametrize("kind", MODELS)
def test_a_handoff_and_a_typed_answer(scripted: str, kind: Any) -> None:
    question = script(
        "Where does it rain?",
        call("transfer_to_forecaster"),
        call("get_weather", city="Oslo"),
        '{"city": "Oslo", "rains": true}',
    )

    async def run() -> Any:
        forecaster = agent_on(kind, scripted, output_type=Forecast)
        desk = Agent("desk", instructions="Hand over.", model=forecaster.model, handoffs=[forecaster])
        return (await Runner.run(desk, question)).final_output

    assert asyncio.run(run()) == Forecast(city="Oslo", rains=True)
