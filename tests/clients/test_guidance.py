"""Guidance, whose grammars the server follows."""

from __future__ import annotations

import re
from typing import Any

from guidance import assistant, gen, regex, select, user
from guidance.models.experimental import VLLMModel


def asked(url: str, grammar: Any) -> Any:
    """The state of a conversation in which the assistant answered by a grammar."""
    state: Any = VLLMModel("demo", base_url=url + "/v1", api_key="none", echo=False)
    with user():
        state += "Where does it rain?"
    with assistant():
        state += grammar
    return state


def test_grammars(url: str) -> None:
    assert asked(url, select(["Oslo", "Rome"], name="city"))["city"] in ("Oslo", "Rome")
    sentence = (
        "It rains in " + regex("[A-Z][a-z]{2,8}", name="city") + " for " + gen("n", regex="[1-9]") + " days"
    )
    answer = asked(url, sentence)
    assert re.fullmatch("[A-Z][a-z]{2,8}", answer["city"]) and answer["n"] in "123456789"
