"""DSPy: typed predictions through its adapters, and streams."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import dspy
import pytest

from tests.clients.scripts import ANSWER, script


class Forecast(dspy.Signature):
    """Tell where it rains."""

    question: str = dspy.InputField()
    city: Literal["Oslo", "Rome"] = dspy.OutputField()
    rains: bool = dspy.OutputField()


def model_on(url: str, **fields: Any) -> dspy.LM:
    """A model of DSPy's on a server."""
    return dspy.LM("openai/demo", api_base=url + "/v1", api_key="none", cache=False, num_retries=0, **fields)


CHAT = "[[ ## city ## ]]\nOslo\n\n[[ ## rains ## ]]\nTrue\n\n[[ ## completed ## ]]"
JSON = '{"city": "Oslo", "rains": true}'


@pytest.mark.parametrize(("adapter", "reply"), [(dspy.ChatAdapter(), CHAT), (dspy.JSONAdapter(), JSON)])
def test_typed_predictions(scripted: str, adapter: Any, reply: str) -> None:
    with dspy.context(lm=model_on(scripted), adapter=adapter):
        result = dspy.Predict(Forecast)(question=script("Where does it rain?", reply))
    assert (result.city, result.rains) == ("Oslo", True)


def test_a_prediction_is_streamed(scripted: str) -> None:
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
    reply = f"[[ ## answer ## ]]\n{ANSWER}\n\n[[ ## completed ## ]]"

    async def run() -> list[Any]:
        with dspy.context(lm=model_on(scripted), adapter=dspy.ChatAdapter()):
            return [part async for part in program(question=script("How is the weather?", reply))]

    *parts, last = asyncio.run(run())
    assert last.answer == ANSWER
    assert len(parts) > 1 and "".join(part.chunk for part in parts) == ANSWER
