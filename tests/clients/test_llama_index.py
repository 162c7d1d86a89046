"""LlamaIndex by its class for servers like OpenAI's: an agent with tools, and typed answers."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.clients.scripts import ANSWER, RAIN, TRIP, WEATHER, first_whole, get_weather


class Forecast(pydantic.BaseModel):
    """A forecast."""

    city: Literal["Oslo", "Rome"]
    rains: bool


def model_on(url: str, **fields: Any) -> OpenAILike:
    """A model of LlamaIndex's on a server."""
    known: Any = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
    return OpenAILike(model="demo", api_base=url + "/v1", api_key="none", max_retries=0, **known | fields)


def test_an_agent_has_two_rounds_of_tools(scripted: str) -> None:
    agent = FunctionAgent(tools=[get_weather], llm=model_on(scripted), system_prompt="Be brief.")

    async def run() -> tuple[str, list[str], str]:
        handler = agent.run(TRIP)
        streamed, results = "", []
        async for event in handler.stream_events():
            if isinstance(event, AgentStream):
                streamed += event.delta
            elif isinstance(event, ToolCallResult):
                results.append(event.tool_output.content)
        return str(await handler), results, streamed

    answer, results, streamed = asyncio.run(run())
    assert answer == ANSWER and streamed == ANSWER
    assert results == list(WEATHER.values())


def test_typed_answers(url: str) -> None:
    model = model_on(url, should_use_structured_outputs=True, max_tokens=60, temperature=0.7)
    typed = model.as_structured_llm(Forecast)

    def ask() -> Any:
        try:
            return typed.chat([ChatMessage(RAIN)]).raw
        except pydantic.ValidationError:  # the answer was cut
            return None

    assert isinstance(first_whole(ask), Forecast)


def test_streams_and_completions(url: str) -> None:
    model = model_on(url, is_chat_model=False, max_tokens=8, temperature=0)
    whole = model.complete('The "with" statement').text
    assert whole and list(model.stream_complete('The "with" statement'))[-1].text == whole
