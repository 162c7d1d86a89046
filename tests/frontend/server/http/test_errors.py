"""Every failure has its status and OpenAI's JSON, and leaves nothing running."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.frontend.server.http.body import LARGE_BODIES, SMALL_BODY_BYTES, IncomingBodies
from pagewire.frontend.server.http.errors import api_error
from pagewire.ipc.logs import TEXT, TextFormatter
from pagewire.ipc.quoting import MAX_MESSAGE
from pagewire.ipc.wire.budget import MAX_NAME_CHARS
from pagewire.ipc.wire.messages import Abort, Submit, TokenDelta
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client

ADMIN = {"x-pagewire-admin": "1"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "w5"}]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"\xff", 400, None),
        (b'{"prompt": "\\ud800"}', 400, None),
        (b"[" * 100_000, 422, None),
        (b'{"prompt": "w5", "user": ' + b"[" * 100_000, 422, "user"),
        (b"[]", 422, None),
        ({}, 422, "prompt"),
        ({"prompt": 5}, 422, "prompt"),
        ({"prompt": ["w5", 5]}, 422, "prompt"),
        ({"prompt": "w5", "temperature": "hot"}, 422, "temperature"),
        ({"prompt": "w5", "stream_options": {"include_usage": 3}}, 422, "stream_options"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ["w5"] * 1025}, 400, "prompt"),
        ({"prompt": "w5", "temperature": -1}, 400, "temperature"),
        ({"prompt": "w5", "temperature": -1, "user": 5}, 400, "temperature"),
        ({"prompt": "w5", "stop_token_ids": [-1]}, 400, "stop_token_ids"),
        ({"prompt": "w5", "stop_token_ids": ["w6"]}, 422, "stop_token_ids"),
        ({"prompt": "w5", "logit_bias": {"5": 101}}, 400, "logit_bias"),
        ({"prompt": "w5", "n": 0}, 400, "n"),
        ({"prompt": "w5", "n": 9}, 400, "n"),
        ({"prompt": "w5", "n": 2, "best_of": 1}, 400, "best_of"),
        ({"prompt": "w5", "best_of": 2, "stream": True}, 400, "best_of"),
        ({"prompt": "w5", "use_beam_search": True, "stream": True}, 400, "use_beam_search"),
        ({"prompt": "w5", "use_beam_search": True, "logprobs": 1}, 400, "logprobs"),
        ({"prompt": "w5", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "w5", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": "w5", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "w5", "suffix": "w6"}, 400, "suffix"),
        ({"prompt": "w5", "stream_options": {}}, 400, "stream_options"),
        ({"prompt": "w5", "timeout": 0}, 400, "timeout"),
        ({"prompt": "w5", "seed": 2**63}, 400, "seed"),
        ({"prompt": "w5", "seed": 2**70}, 400, "seed"),
        ({"prompt": "w5", "truncation_side": "right", "truncate_prompt_tokens": 3}, 400, "truncation_side"),
        ({"prompt": "w5", "truncate_prompt_tokens": 4097}, 400, "truncate_prompt_tokens"),
        ({"prompt": "w5", "priority": 1}, 400, "priority"),
        ({"prompt": [64]}, 400, "prompt"),
        ({"prompt": [5] * 4096}, 400, None),
        ({"prompt": "w5", "guided_regex": "a", "guided_choice": ["b"]}, 400, "guided_regex"),
        ({"prompt": "w5", "response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"prompt": "w5", "response_format": {"type": "xml"}}, 422, "response_format"),
    ],
)
def test_bad_completions(client: Client, core: FakeCore, body: Any, status: int, param: str | None) -> None:
    answer = client.post(COMPLETIONS, body)
    assert answer.status == status, answer.body
    assert answer.error["param"] == param
    assert answer.error["message"] and answer.error["type"]
    assert not core.submitted


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"messages": "w5"}, 422),
        ({"messages": [5]}, 422),
        ({"messages": []}, 400),
        ({"messages": [{"content": "w5"}]}, 400),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
        ),
        ({"messages": HELLO, "top_logprobs": 2}, 400),
        ({"messages": HELLO, "chat_template": "{{ 1 }}"}, 400),
        ({"messages": HELLO, "functions": [{"name": "f"}]}, 400),
        ({"messages": HELLO, "modalities": ["audio"]}, 400),
        ({"messages": HELLO, "web_search_options": {}}, 400),
        ({"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True}, 400),
    ],
)
def test_bad_chats(client: Client, core: FakeCore, body: Any, status: int) -> None:
    answer = client.post(CHAT, body)
    assert answer.status == status, answer.body
    assert answer.error["message"]
    assert not core.submitted


def test_prompts_over_the_context_length(client: Client) -> None:
    """And begins with the words by which clients know it."""
    chat = [{"role": "user", "content": "w5 " * 4096}]
    for target, body in (
        (COMPLETIONS, {"prompt": [5] * 4096}),
        (COMPLETIONS, {"prompt": "w" * (1 << 21)}),
        (CHAT, {"messages": chat}),
        (CHAT, {"messages": chat, "stream": True}),
    ):
        error = client.post(target, body).error
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 4096 tokens")


def test_bodies(serve: Callable[..., Client], core: FakeCore) -> None:
    core.auto = True
    client = serve(max_request_bytes=100, body_seconds=0.05)
    large = json.dumps({"prompt": "w5 " * 50}).encode()
    assert client.post(COMPLETIONS, large, **{"content-length": str(len(large))}).status == 413
    parts = [large[:60], large[60:120], large[120:]]
    answer = client.post(COMPLETIONS, parts)
    assert answer.status == 413 and answer.headers["connection"] == "close"
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert client.post(COMPLETIONS, {"prompt": "w5"}, **{"content-type": kind}).status == 415
    kind = "Application/JSON; charset=utf-8"
    assert client.post(COMPLETIONS, {"prompt": "w5"}, **{"content-type": kind}).status == 200


def test_bodies_that_wait_to_be_decoded_count_as_well(client: Client) -> None:
    """Else many large ones could wait for their turn."""
    bodies: IncomingBodies = client.app.state.incoming_bodies
    large = json.dumps({"prompt": "w5"}).encode() + b" " * (1 << 20)

    async def play() -> None:
        async with bodies.turn(len(large)):
            calls = [client.call("POST", COMPLETIONS, large) for _ in range(2)]
            while bodies.num_bytes < 2 * (len(large) - SMALL_BODY_BYTES):
                await asyncio.sleep(0)
            assert not any(call.task.done() for call in calls)
        assert [(await call.answer()).status for call in calls] == [200, 200]
        assert bodies.num_bytes == 0

    client.run(play)


def test_bodies_that_arrive_have_a_limit_in_all(serve: Callable[..., Client], core: FakeCore) -> None:
    """Else many slow clients could fill the memory; small requests pass nevertheless."""
    core.auto = True
    client = serve(max_request_bytes=1 << 20)
    bodies: IncomingBodies = client.app.state.incoming_bodies
    assert bodies.limit == LARGE_BODIES << 20
    part = b" " * ((1 << 20) - 100)

    async def play() -> None:
        slow = [client.call("POST", COMPLETIONS, [part], ends=False) for _ in range(LARGE_BODIES + 1)]
        while bodies.num_bytes <= bodies.limit - len(part):
            await asyncio.sleep(0)
        refused = await client.call("POST", COMPLETIONS, [part, part], ends=False).answer()
        assert (refused.status, refused.error["code"]) == (503, "too_many_bodies")
        assert refused.headers["connection"] == "close" and refused.headers["retry-after"] == "1"
        assert (await client.call("POST", COMPLETIONS, {"prompt": "w5"}).answer()).status == 200
        for call in slow:
            call.hang_up()
            await call.task
        assert bodies.num_bytes == 0
        large = json.dumps({"prompt": "w5"}).encode() + part[:-100]
        assert (await client.call("POST", COMPLETIONS, large).answer()).status == 200
        assert bodies.num_bytes == 0

    client.run(play)


def test_large_bodies_of_one_tenant_leave_room_for_others(
    serve: Callable[..., Client], core: FakeCore
) -> None:
    core.auto = True
    client = serve(max_request_bytes=1 << 20, api_key=["alice-secret-key", "bob-secret-key"])
    bodies: IncomingBodies = client.app.state.incoming_bodies
    part = b" " * ((1 << 20) - 100)
    alice, bob = ({"authorization": f"Bearer {name}-secret-key"} for name in ("alice", "bob"))

    async def play() -> None:
        slow = [client.call("POST", COMPLETIONS, [part], alice, ends=False) for _ in range(LARGE_BODIES)]
        await asyncio.wait([call.task for call in slow], return_when=asyncio.FIRST_COMPLETED)
        refused = [await call.answer() for call in slow if call.task.done()]
        assert refused and {(answer.status, answer.error["code"]) for answer in refused} == {
            (429, "too_many_bodies")
        }
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        large = json.dumps({"prompt": "w5"}).encode() + part[:-100]
        assert (await client.call("POST", COMPLETIONS, large, bob).answer()).status == 200
        for call in slow:
            if not call.task.done():
                call.hang_up()
                await call.task
        assert bodies.num_bytes == 0 and not bodies._by_tenant

    client.run(play)


def test_a_body_that_never_ends(serve: Callable[..., Client]) -> None:
    client = serve(body_seconds=0.02)

    async def play() -> Answer:
        return await client.call("POST", COMPLETIONS, [b'{"prompt": '], ends=False).answer()

    assert client.run(play).status == 408


def test_paths_and_methods(client: Client) -> None:
    for path in ("/nothing", "/v1", "/v1/completions/", "//v1/completions", "/V1/completions", "/v1/models/"):
        answer = client.post(path, {"prompt": "w5"})
        assert answer.status in (404, 405), path
        assert answer.error["message"]
    answer = client.get(COMPLETIONS)
    assert answer.status == 405 and answer.headers["allow"] == "POST"
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("error_type", "status"),
    [
        ("EngineBusyError", 429),
        ("EngineStalledError", 503),
        ("EngineAsleepError", 503),
        ("PermissionError", 403),
        ("ValueError", 400),
        ("TypeError", 400),
        ("RequestCrashedEngineError", 500),
        ("AdapterCrashedWorkerError", 500),
        ("WeightsChangedError", 503),
        (None, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_core_refuses(
    serve: Callable[..., Client], core: FakeCore, error_type: str | None, status: int, stream: bool
) -> None:
    """Also for a stream: nothing was sent yet."""
    client = serve()

    async def play() -> Answer:
        call = client.call("POST", COMPLETIONS, {"prompt": "w5", "stream": stream})
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        core.deltas([TokenDelta(request.key, 0, [], "error", error="because", error_type=error_type)])
        return await call.answer()

    answer = client.run(play)
    assert (answer.status, answer.error["message"]) == (status, "because")
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    codes = {
        "RequestCrashedEngineError": "request_crashed_engine",
        "AdapterCrashedWorkerError": "adapter_crashed_worker",
    }
    if status == 500:
        assert answer.error["code"] == codes.get(error_type or "")
    assert not client.app.state.service.open


def test_an_error_in_the_middle_of_a_stream(serve: Callable[..., Client], core: FakeCore) -> None:
    client = serve()

    async def play() -> Answer:
        call = client.call("POST", CHAT, {"messages": HELLO, "stream": True})
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        core.tokens(request.key, [7])
        start, first = await call.message(), await call.message()
        assert start["status"] == 200 and b"w7" in first["body"]
        core.tokens(request.key, [], finish_reason="error", error="the worker crashed")
        rest = b""
        while (part := await call.message()).get("more_body"):
            rest += part["body"]
        await call.task
        return Answer(200, {"content-type": "text/event-stream; charset=utf-8"}, rest + part["body"])

    (event,) = client.run(play).events
    assert event["error"]["message"] == "the worker crashed" and event["error"]["type"] == "server_error"


def test_the_core_is_down(serve: Callable[..., Client], core: FakeCore) -> None:
    client = serve()
    assert client.get("/health").status == client.get("/ping").status == 200

    async def play() -> Answer:
        call = client.call("POST", COMPLETIONS, {"prompt": "w5"})
        await asyncio.to_thread(core.expect, Submit)
        await asyncio.to_thread(core.close)
        return await call.answer()

    answer = client.run(play)
    assert answer.status == 503 and answer.error["code"] == "engine_down"
    for later in (client.post(CHAT, {"messages": HELLO, "stream": True}), client.get("/health")):
        assert later.status == 503 and later.error["type"] == "service_unavailable_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(
    serve: Callable[..., Client], core: FakeCore, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve()
    caplog.set_level(logging.INFO, "pagewire.server")

    async def play() -> None:
        call = client.call("POST", COMPLETIONS, {"prompt": ["w5", "w6"], "stream": stream})
        submitted = (await asyncio.to_thread(core.expect, Submit)).requests
        core.tokens(submitted[0].key, [7])
        if stream:
            assert (await call.message())["status"] == 200
        call.hang_up()
        await call.task
        aborted = await asyncio.to_thread(core.expect, Abort)
        assert sorted(aborted.keys) == [request.key for request in submitted]

    client.run(play)
    assert not client.app.state.service.open
    assert "status=499" in caplog.text and "the client left" in caplog.text


def test_a_deadline(serve: Callable[..., Client], core: FakeCore) -> None:
    client = serve()
    for body, headers in (({"timeout": 0.3}, {}), ({}, {"x-request-timeout": "0.3"})):
        answer = client.post(COMPLETIONS, {"prompt": "w5"} | body, **headers)
        assert answer.status == 408 and answer.error["code"] == "deadline_passed"
        assert answer.headers["x-should-retry"] == "false"  # else OpenAI's clients would, twice
        assert core.expect(Abort).keys
    core.auto = True
    assert client.post(COMPLETIONS, {"prompt": "w5", "timeout": 60}).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_abort(serve: Callable[..., Client], core: FakeCore, stream: bool) -> None:
    """By the answer's id; what another server of the core gives, too."""
    client = serve(enable_admin=True)
    core.calls["abort_request"] = lambda request_id, frontend: 2 if request_id == "elsewhere" else 0

    async def play() -> Answer:
        call = client.call("POST", COMPLETIONS, {"prompt": "w5", "stream": stream})
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        names = [request.request_id, "other", "elsewhere"]
        done = await client.call("POST", "/abort", {"request_id": names}, ADMIN).answer()
        assert done.json == {"aborted": [request.request_id, "elsewhere"]}
        return await call.answer()

    answer = client.run(play)
    assert answer.status == 499 and answer.error["type"] == "abort_error"
    assert core.expect(Abort).keys


def test_what_others_abort(serve: Callable[..., Client], core: FakeCore) -> None:
    client = serve()

    async def play() -> Answer:
        call = client.call("POST", COMPLETIONS, {"prompt": "w5"})
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        core.tokens(request.key, [7], finish_reason="abort")
        return await call.answer()

    assert client.run(play).status == 499


def test_shutting_down(serve: Callable[..., Client], core: FakeCore) -> None:
    """The HTTP server cancels what has not ended in time: clients are told."""
    client = serve()

    async def play() -> Answer:
        call = client.call("POST", COMPLETIONS, {"prompt": "w5"})
        await asyncio.to_thread(core.expect, Submit)
        call.task.cancel()
        return await call.answer()

    answer = client.run(play)
    assert answer.status == 503 and answer.error["code"] == "shutting_down"
    assert core.expect(Abort).keys


def test_what_nobody_foresaw(client: Client, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """500, the cause in the log, nothing of it to the client but its message."""
    monkeypatch.setattr("pagewire.frontend.server.openai.completions.completion_params", lambda *_: 1 / 0)
    answer = client.post(COMPLETIONS, {"prompt": "w5"})
    assert answer.status == 500 and answer.error["type"] == "server_error"
    assert "ZeroDivisionError" in caplog.text


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    ("target", "body"),
    [
        (COMPLETIONS, {"prompt": "w5", "model": LONG}),
        (COMPLETIONS, {"prompt": "w5", "response_format": {"type": LONG}}),
        (COMPLETIONS, {"prompt": "w5", "early_stopping": LONG}),
        (COMPLETIONS, {"prompt": "w5", "logit_bias": {LONG: 1}}),
        (COMPLETIONS, {"prompt": "w5", "n": int("9" * 4000)}),
        (COMPLETIONS, {"prompt": "w5", "user": LONG, "safety_identifier": LONG, "temperature": -1}),
        (CHAT, {"messages": HELLO, "tools": [{"type": LONG}]}),
        (CHAT, {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": LONG}}}),
        ("/v1/responses", {"input": "w5", "previous_response_id": LONG}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": LONG}]}),
        ("/v1/responses", {"input": [{"type": LONG}]}),
        ("/" + LONG, {}),
        ("/pause?wait_for_inflight_requests=" + LONG, {}),
        ("/sleep?level=" + LONG, {}),
        ("/v1/models/" + LONG, None),
    ],
    ids=range(15),
)
def test_neither_answers_nor_the_log_repeat_all_of_the_input(
    serve: Callable[..., Client], target: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagewire")
    answer = serve(enable_admin=True).request("GET" if body is None else "POST", target, body, ADMIN)
    assert 400 <= answer.status < 500
    assert len(answer.body) < 2 * MAX_MESSAGE
    assert all(len(TextFormatter(TEXT).format(record)) < 3 * MAX_MESSAGE for record in caplog.records)


def test_the_log_line_of_a_request_is_bounded(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """Of one that is answered, too; only its prompt is logged at the length that the operator wants."""
    caplog.set_level(logging.INFO, "pagewire")
    longest = "\n" * MAX_NAME_CHARS
    body = {"prompt": ["w5"] * 1000, "user": longest, "request_id": longest, LONG: 1}
    assert client.post(COMPLETIONS, body).status == 200
    assert len(caplog.records) == 2
    assert all(len(TextFormatter(TEXT).format(record)) < MAX_MESSAGE for record in caplog.records)


def test_a_process_without_a_free_descriptor_is_busy() -> None:
    """It is no defect, and no fault of the request: another try may find one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError) as caught:
            os.open(os.devnull, os.O_RDONLY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    error = api_error(caught.value)
    assert (error.status, error.headers) == (503, {"retry-after": "1"})
    assert "files and sockets" in error.message
