"""smolagents: agents that call tools, and agents that write code."""

from __future__ import annotations

from typing import Any

import pytest
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel

from tests.clients.scripts import ANSWER, WEATHER, call, get_weather, script


def model_on(url: str) -> OpenAIModel:
    """A model of smolagents' on a server."""
    return OpenAIModel("demo", api_base=url + "/v1", api_key="none")


@pytest.mark.parametrize("streams", [False, True])
def test_two_rounds_of_tools(scripted: str, streams: bool) -> None:
    weather: Any = tool(get_weather)
    agent = ToolCallingAgent(
        [weather], model_on(scripted), stream_outputs=streams, verbosity_level=LogLevel.OFF, max_steps=4
    )
    calls = (
        call("get_weather", city="Oslo"),
        call("get_weather", city="Rome"),
        call("final_answer", answer=ANSWER),
    )
    assert agent.run(script("How is the weather?", *calls)) == ANSWER
    results = [step.observations for step in agent.memory.steps if getattr(step, "observations", None)]
    assert [result.strip() for result in results[:2]] == list(WEATHER.values())


@pytest.mark.parametrize("streams", [False, True])
def test_code(scripted: str, streams: bool) -> None:
    weather: Any = tool(get_weather)
    agent = CodeAgent(
        [weather], model_on(scripted), stream_outputs=streams, verbosity_level=LogLevel.OFF, max_steps=3
    )
    first = 'Thought: I ask.\n<code>\nprint(get_weather(city="Oslo"))\n</code>'
    second = 'Thought: I know.\n<code>\nfinal_answer("Rain")\n</code>'
    assert agent.run(script("How is the weather?", first, second)) == "Rain"
    assert "It rains." in (agent.memory.steps[1].observations or "")
