"""Prompts that are to stay cached: what requests ask for, and what answers say of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagewire.ipc.wire.items import RetainedPrefix, Retention
from pagewire.ipc.wire.messages import Request, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "w5 w6"}]


def body(path: str, **fields: Any) -> dict[str, Any]:
    return ({"input": "w5 w6"} if path == RESPONSES else {"messages": HELLO}) | fields


def played(
    client: Client, core: FakeCore, path: str, fields: dict[str, Any], **facts: Any
) -> tuple[Answer, Request]:
    """An answer of one token, and what was submitted for it."""
    core.auto = False

    async def play() -> tuple[Answer, Request]:
        call = client.call("POST", path, fields)
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        core.tokens(request.key, [5], finish_reason="length", num_cached_tokens=1, **facts)
        return await call.answer(), request

    return client.run(play)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("fields", "wishes"),
    [
        ({}, []),
        ({"prompt_cache_key": "k"}, []),
        ({"prompt_cache_retention": "in_memory"}, [Retention(300.0, "", 0, True)]),
        (
            {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
            [Retention(86_400.0, "k", 0, True)],
        ),
        ({"session_id": "s"}, [Retention(300.0, "s", 0, True)]),
        (
            {"session_id": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
            [Retention(86_400.0, "s", 0, True)],
        ),
    ],
)
def test_what_a_request_asks_for(
    client: Client, core: FakeCore, path: str, fields: dict[str, Any], wishes: list[Retention]
) -> None:
    answer = client.post(path, body(path, **fields))
    assert answer.status == 200, answer.body
    (request,) = core.submitted.values()
    assert request.retention == wishes


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_unknown_time_is_refused(client: Client, path: str) -> None:
    answer = client.post(path, body(path, prompt_cache_retention="1y"))
    assert answer.status == 400 and "one of in_memory" in answer.body.decode()


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_the_answer_says_what_is_kept(client: Client, core: FakeCore, path: str) -> None:
    fields = body(path, session_id="s")
    whole, _ = played(client, core, path, fields, retained=[RetainedPrefix(2)])
    usage = whole.json["usage"]
    details = usage["input_tokens_details" if path == RESPONSES else "prompt_tokens_details"]
    assert details == {"cached_tokens": 1, "retained_tokens": 2} and "warning" not in whole.headers
    refused, _ = played(client, core, path, fields, retained=[RetainedPrefix(0, "of 8 blocks, 8 are taken")])
    text = "only 0 tokens of the prompt are kept in the cache: of 8 blocks, 8 are taken"
    assert refused.headers["warning"] == f'299 pagewire "{text}"'
    plain, _ = played(client, core, path, body(path))
    assert "retained_tokens" not in plain.body.decode()


def test_a_stream_is_warned_before_it_begins(client: Client, core: FakeCore) -> None:
    fields = body(CHAT, session_id="s", stream=True)
    answer, _ = played(client, core, CHAT, fields, retained=[RetainedPrefix(0, "no room")])
    assert "no room" in answer.headers["warning"]


def test_beams_are_not_kept(client: Client) -> None:
    answer = client.post(CHAT, body(CHAT, session_id="s", use_beam_search=True, n=2))
    assert answer.status == 400 and "beam search" in answer.body.decode()


def test_a_prefetch_computes_a_prompt_and_keeps_it(client: Client, core: FakeCore) -> None:
    path = "/v1/retention/prefetch"
    fields = body(path, prompt_cache_key="k", max_tokens=50, min_tokens=9)
    answer, request = played(client, core, path, fields, retained=[RetainedPrefix(2)])
    assert request.retention == [Retention(300.0, "k")] and request.params.max_tokens == 1
    assert answer.json == {
        "prompt_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1, "retained_tokens": 2},
    }
    assert client.post(path, body(path, stream=True)).status == 400


def test_a_release_names_a_session_or_a_key(client: Client, core: FakeCore) -> None:
    calls = []
    core.calls["release_prefixes"] = lambda session, tenant: calls.append((session, tenant)) or 32
    path = "/v1/retention/release"
    assert client.post(path, {"session_id": "s"}).json == {"released_tokens": 32}
    assert client.post(path, {"prompt_cache_key": "k"}).json == {"released_tokens": 32}
    assert calls == [("s", ""), ("k", "")]
    for fields in ({}, {"session_id": "s", "prompt_cache_key": "k"}, {"session_id": ""}):
        assert client.post(path, fields).status == 400
