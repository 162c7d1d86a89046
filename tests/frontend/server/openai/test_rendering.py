"""Prompts of requests without their answers: the tokens that the engine would get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client

ASK = [{"role": "user", "content": "w5 w6"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/chat/completions", {"messages": ASK * 3, "truncate_prompt_tokens": 2}),
        ("/v1/completions", {"prompt": "w5 w6 w7"}),
        ("/v1/completions", {"prompt": "w5 w6 w7", "truncate_prompt_tokens": 2, "add_special_tokens": False}),
        ("/v1/completions", {"prompt": [["w5"], "w7"][1:]}),
        ("/v1/completions", {"prompt": [5, 6, 7]}),
        ("/v1/completions", {"prompt": ["w5", "w6 w7"]}),
    ],
)
def test_the_tokens_are_those_of_the_request(
    client: Client, core: FakeCore, path: str, fields: dict[str, Any]
) -> None:
    rendered = client.post(f"{path}/render", fields)
    assert rendered.status == 200, rendered.body
    assert not core.submitted
    assert client.post(path, fields | {"max_tokens": 1}).status == 200
    listed = rendered.json if isinstance(rendered.json, list) else [rendered.json]
    assert [each["token_ids"] for each in listed] == [r.prompt.token_ids for r in core.submitted.values()]
    assert all(each["model"] == "fake" and each["request_id"] for each in listed)


def test_a_prompt_that_is_too_long_is_refused_as_it_would_be(serve: Callable[..., Client]) -> None:
    client = serve()
    for path, fields in (
        ("/v1/completions", {"prompt": "w5 " * 5000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5 " * 5000}]}),
    ):
        assert client.post(f"{path}/render", fields).status == client.post(path, fields).status == 400
    assert client.post("/v1/completions/render", {"model": "other", "prompt": "w5"}).status in (200, 404)
    assert client.post("/v1/chat/completions/render", {}).status == 422
