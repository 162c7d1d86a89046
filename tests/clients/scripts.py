"""What tests of clients share: scripts for `scripted_server.py`, a tool, and patience with the demo model."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def script(question: str, *replies: str | dict[str, Any]) -> str:
    """Return the message of a user after which the model gives these replies, one for each of its turns."""
    encoded = base64.b64encode(json.dumps(replies).encode()).decode()
    return f"{question} [[script:{encoded}]]"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a reply that calls a tool."""
    return {"name": name, "arguments": arguments}


RAIN = 'return {"city":"Oslo","rains":true}\n' * 6
"""A message to which the demo model, held to a schema with these properties, mostly writes a whole answer."""


def first_whole(ask: Callable[[], T | None], attempts: int = 20) -> T:
    """Return the first answer that is not None: the demo model may write white space until it is cut."""
    for _ in range(attempts):
        if (answer := ask()) is not None:
            return answer
    raise AssertionError(f"none of {attempts} answers is whole")


WEATHER = {"Oslo": "It rains.", "Rome": "The sun shines."}
ANSWER = "Rain in Oslo, and sun in Rome."
TRIP = script(
    "How is the weather?", call("get_weather", city="Oslo"), call("get_weather", city="Rome"), ANSWER
)
"""Two rounds of a tool `get_weather`, whose results are those of `WEATHER`, and an answer."""


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: name of the city.
    """
    return WEATHER[city]
