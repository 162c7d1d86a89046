"""What /v1/systemone refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.frontend.server.client import Client

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"chat_template": TEMPLATE}, {}, "not one token"),
        ({"chat_template": TEMPLATE + "<think>", "reasoning_parser": "deepseek_r1"}, {}, "reasoning"),
        ({"chat_template": TEMPLATE}, {"model": "other"}, "no model"),
    ],
)
def test_what_a_server_cannot_decide(
    serve: Callable[..., Client], options: Any, more: Any, message: str
) -> None:
    server = serve(any_model_name=False, **options)
    question = {"type": "choice", "instructions": "w5", "criteria": {"a": None, "b": None}}
    answer = server.post("/v1/systemone", {"state": "w6", "questions": {"q": question}} | more)
    assert answer.status in (400, 404) and message in answer.error["message"]
