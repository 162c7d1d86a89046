"""Names of models in requests: patterns of names, unknown names, and what /v1/models says of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.serving.name_patterns import name_matches
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.messages import EngineInfo
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client

COMPLETION = {"prompt": [1, 2], "max_tokens": 2}


def served(new_core: Callable[..., FakeCore], info: EngineInfo, *names: str, **options: Any) -> Client:
    core = new_core()
    core.info = msgspec.structs.replace(info, served_model_names=list(names))
    core.auto = True
    return Client(AsyncLLM.attach(core.address), **options)


def test_patterns_are_names_of_the_model(new_core: Callable[..., FakeCore], engine_info: EngineInfo) -> None:
    client = served(new_core, engine_info, "demo", "claude-*", "*-mini", "also", any_model_name=False)
    for name in ("demo", "also", "claude-opus-5", "claude-", "gpt-mini", "claude-5:latest"):
        answer = client.post("/v1/completions", COMPLETION | {"model": name})
        assert (answer.status, answer.json["model"]) == (200, "demo"), name
        assert "warning" not in answer.headers
    refused = client.post("/v1/completions", COMPLETION | {"model": "gpt-5"})
    message = "there is no model 'gpt-5'; served: demo, also, claude-*, *-mini"
    assert (refused.status, refused.error["message"]) == (404, message)
    assert [card["id"] for card in client.get("/v1/models").json["data"]] == ["demo", "also"]
    assert client.get("/v1/models/claude-opus-5").json["id"] == "demo"


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 200),
        ({"host": "::1"}, 200),
        ({"uds": "/tmp/x"}, 200),
        ({"host": "0.0.0.0"}, 404),
        ({"host": "0.0.0.0", "any_model_name": True}, 200),
        ({"any_model_name": False}, 404),
    ],
)
def test_an_unknown_name_is_served_where_only_this_machine_connects(
    serve: Callable[..., Client], core: FakeCore, options: dict[str, Any], status: int
) -> None:
    core.auto = True
    answer = serve(**options).post("/v1/completions", COMPLETION | {"model": "gpt-5"})
    assert answer.status == status
    if status == 200:
        assert answer.json["model"] == "fake"
        assert answer.headers["warning"] == (
            "299 pagewire \"there is no model 'gpt-5': fake, the only one, answers (--no-any-model-name)\""
        )
    else:
        assert answer.error["message"] == "there is no model 'gpt-5'; served: fake"


def test_what_describes_a_model_does_not_take_another_name(client: Client) -> None:
    assert client.get("/v1/models/gpt-5").error["code"] == "model_not_found"
    assert client.post("/api/show", {"model": "gpt-5"}).status == 404


def test_cards_say_what_clients_ask_for(client: Client) -> None:
    (card,) = client.get("/v1/models").json["data"]
    assert card["context_window"] == card["context_length"] == card["max_model_len"] == 4096
    assert (card["input_modalities"], card["output_modalities"]) == (["text"], ["text"])
    assert card["capabilities"][0] == "completion"


def test_the_first_name_is_no_pattern() -> None:
    assert EngineArgs(model="m", served_model_name=["a", "b-*"]).served_names() == ["a", "b-*"]
    with pytest.raises(ValueError, match=r"the first must be a name, not the pattern 'b-\*'"):
        EngineArgs(model="m", served_model_name=["b-*"]).served_names()


@given(st.text("ab*", max_size=6).filter(lambda text: "*" in text), st.text("ab", max_size=8))
def test_a_pattern_is_a_glob(pattern: str, name: str) -> None:
    def naive(pattern: str, name: str) -> bool:
        if not pattern:
            return not name
        if pattern[0] == "*":
            return any(naive(pattern[1:], name[at:]) for at in range(len(name) + 1))
        return name[:1] == pattern[0] and naive(pattern[1:], name[1:])

    assert name_matches(pattern, name) == naive(pattern, name)
