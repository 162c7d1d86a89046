"""Guidance, whose grammars the server follows."""

from __future__ import annotations

import json
import re
from typing import Any

import guidance
from guidance import assistant, gen, regex, select, user
from guidance.models.experimental import VLLMModel

from tests.clients.scripts import RAIN, first_whole


def asked(url: str, grammar: Any) -> Any:
    """The state of a conversation in which the assistant answered by a grammar."""
    state: Any = VLLMModel("demo", base_url=url + "/v1", api_key="none", echo=False)
    with user():
        state += RAIN
    with assistant():
        state += grammar
    return state


SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "rains": {"type": "boolean"}},
    "required": ["city", "rains"],
    "additionalProperties": False,
}


def test_grammars(url: str) -> None:
    assert asked(url, select(["Oslo", "Rome"], name="city"))["city"] in ("Oslo", "Rome")
    sentence = (
        "It rains in " + regex("[A-Z][a-z]{2,8}", name="city") + " for " + gen("n", regex="[1-9]") + " days"
    )
    answer = asked(url, sentence)
    assert re.fullmatch("[A-Z][a-z]{2,8}", answer["city"]) and answer["n"] in "123456789"


def test_a_schema(url: str) -> None:
    grammar = guidance.json(name="forecast", schema=SCHEMA, max_tokens=60)
    forecast = first_whole(lambda: asked(url, grammar).get("forecast"))
    assert set(json.loads(forecast)) == {"city", "rains"}
