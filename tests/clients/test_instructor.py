"""Instructor: typed answers by tools, by JSON schemas, and in increments."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
import pydantic
import pytest
from instructor.core import IncompleteOutputException, InstructorRetryException

from tests.clients.scripts import RAIN, first_whole, script


class Forecast(pydantic.BaseModel):
    """A forecast."""

    city: Literal["Oslo", "Rome"]
    rains: bool


def client_on(url: str, mode: instructor.Mode) -> Any:
    """Instructor on a server."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_typed_answers(url: str, mode: instructor.Mode) -> None:
    client = client_on(url, mode)
    messages = [{"role": "user", "content": RAIN}]

    def ask() -> Any:
        try:
            return client.chat.completions.create(
                model="demo",
                messages=messages,
                response_model=Forecast,
                max_tokens=60,
                temperature=0.7,
                max_retries=1,
            )
        except (InstructorRetryException, IncompleteOutputException):  # the answer was cut
            return None

    assert isinstance(first_whole(ask), Forecast)


def test_a_partial_answer_grows(scripted: str) -> None:
    client = client_on(scripted, instructor.Mode.JSON_SCHEMA)
    question = script("Where does it rain?", '{"city": "Oslo", "rains": true}')
    parts = list(
        client.chat.completions.create_partial(
            model="demo", messages=[{"role": "user", "content": question}], response_model=Forecast
        )
    )
    assert len(parts) > 2 and parts[-1] == Forecast(city="Oslo", rains=True)


def test_a_wrong_answer_is_asked_for_again(scripted: str) -> None:
    client = client_on(scripted, instructor.Mode.JSON)
    question = script("Where does it rain?", '{"city": "Paris"}', '{"city": "Rome", "rains": false}')
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": question}], response_model=Forecast, max_retries=2
    )
    assert (answer.city, answer.rains) == ("Rome", False)
