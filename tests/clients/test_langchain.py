"""LangChain by its classes for OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pydantic
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.scripts import ANSWER, RAIN, TRIP, first_whole, get_weather

weather_tool: Any = tool(get_weather)


class Forecast(pydantic.BaseModel):
    """A forecast."""

    city: Literal["Oslo", "Rome"]
    rains: bool


def chat_model(kind: str, url: str, **fields: Any) -> Any:
    """A chat model of LangChain's on a server."""
    if kind == "anthropic":
        return ChatAnthropic(
            model_name="demo", base_url=url, api_key="none", max_retries=0, timeout=60, stop=None, **fields
        )
    responses: Any = {"use_responses_api": True} if kind == "responses" else {"stream_usage": True}
    return ChatOpenAI(
        model="demo", base_url=url + "/v1", api_key="none", max_retries=0, **responses, **fields
    )


@pytest.mark.parametrize("kind", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("streams", [False, True])
def test_two_rounds_of_tools(scripted: str, kind: str, streams: bool) -> None:
    model = chat_model(kind, scripted).bind_tools([weather_tool])
    messages: list[Any] = [HumanMessage(TRIP)]
    for _ in range(3):
        if streams:
            answer: Any = None
            for chunk in model.stream(messages):
                assert isinstance(chunk, AIMessageChunk)
                answer = chunk if answer is None else answer + chunk
        else:
            answer = model.invoke(messages)
        messages.append(answer)
        for call in answer.tool_calls:
            messages.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
    assert answer.text == ANSWER and len(messages) == 6
    assert answer.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("kind", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_typed_answers(url: str, kind: str, method: Any) -> None:
    model = chat_model(kind, url, max_tokens=60, temperature=0.7)
    typed: Any = model.with_structured_output(Forecast, method=method, include_raw=True)

    def ask() -> Any:
        try:
            return typed.invoke(RAIN)["parsed"]
        except openai.LengthFinishReasonError:
            return None

    assert isinstance(first_whole(ask), Forecast)


def test_completions(url: str) -> None:
    model: Any = OpenAI(model="demo", base_url=url + "/v1", api_key="none", max_tokens=8, temperature=0)
    prompt = 'The "with" statement'
    assert "".join(model.stream(prompt)) == model.invoke(prompt)
