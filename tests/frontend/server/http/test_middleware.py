"""What stands before the routes: keys, CORS, prefixes, request ids, the user's middleware; and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.http.auth import PUBLIC
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.page import PATHS
from pagewire.ipc.logs import JsonFormatter
from pagewire.ipc.wire.messages import RequestTiming, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client

KEYS = ["first key", "second"]
ADMIN = {"x-pagewire-admin": "1"}


def paths_of(client: Client) -> list[tuple[str, str]]:
    """Method and path of every route."""
    routes = [route for route in client.app.routes if isinstance(route, Operation)]
    assert len(routes) > 15
    return [(route.method, route.path.replace("{model:path}", "fake")) for route in routes]


def spellings(path: str) -> list[str]:
    """Ways to write a path that a sloppy check could take for another."""
    return [
        path,
        path + "/",
        "/" + path,
        path + "//",
        "/health/.." + path,
        "/health" + path,
        path + "/health",
        path + "?x=/health",
        path + ";/health",
        path + "#/health",
        path.upper(),
        "/root" + path,
        "/root/" + path,
        path.replace("/", "//"),
        "/./" + path.lstrip("/"),
        path + "%2fhealth",
        path + "\x00",
    ]


@pytest.mark.parametrize("root_path", ["", "/root", "/health"])
def test_every_path_wants_a_key(serve: Callable[..., Client], root_path: str) -> None:
    """But /health, /ready and the files of the page, which tell nothing."""
    assert {"/health", "/ready"} == PUBLIC
    assert all(path == "/" or path.startswith("/page/") for path in PATHS)
    client = serve(api_key=KEYS, enable_admin=True, root_path=root_path)
    methods = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "health")
    for method, path in [*paths_of(client), ("GET", "/"), ("GET", "/nothing"), ("GET", "")]:
        for spelling in spellings(path):
            bare = spelling.partition("?")[0]
            public = any(path in PUBLIC | PATHS for path in (bare, bare.removeprefix(root_path)))
            for tried in {method, *methods}:
                answer = client.request(tried, spelling)
                assert public or answer.status == 401, (tried, spelling)
                if not public and tried != "HEAD":
                    assert b"give a valid API key" in answer.body


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer first",
        "Bearer first keys",
        "Basic second",
        "second",
        "Bearer second,first key",
        "Bearer Second",
        "Bearer sécond",
        "Bearer second\x00",
    ],
)
def test_wrong_keys(serve: Callable[..., Client], shown: str) -> None:
    answer = serve(api_key=KEYS).get("/v1/models", authorization=shown)
    assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"


def test_right_keys(serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    for shown in ("Bearer first key", "bearer second", "Bearer  second "):
        assert serve(api_key=KEYS).get("/v1/models", authorization=shown).status == 200
    monkeypatch.setenv("PAGEWIRE_API_KEY", "third")
    assert serve().get("/v1/models").status == 401
    assert serve().get("/v1/models", authorization="Bearer third").status == 200
    assert serve(api_key=KEYS).get("/v1/models", authorization="Bearer second").status == 200


def test_paths_of_admins_name_the_option(serve: Callable[..., Client]) -> None:
    client = serve()
    for path in ("/pause", "/start_profile", "/v1/load_lora_adapter"):
        answer = client.post(path, {})
        assert answer.status == 404
        assert answer.error["message"] == f"{path} needs a server with --enable-admin"
    assert "unknown path" in client.post("/pauses", {}).error["message"]


def test_admin_is_off_unless_asked_for(serve: Callable[..., Client]) -> None:
    assert serve().post("/pause").status == 404
    assert serve().post("/abort", {"request_id": "x"}).status == 404


def test_admin(serve: Callable[..., Client], core: FakeCore) -> None:
    calls: list[Any] = []
    names = ("pause", "resume", "sleep", "wake_up", "reset_prefix_cache", "is_paused", "is_sleeping")
    for name in names:
        core.calls[name] = lambda *args, name=name: calls.append((name, *args)) or True
    client = serve(enable_admin=True)
    assert client.post("/pause?wait_for_inflight_requests=true", **ADMIN).json == {"paused": True}
    assert client.post("/resume", **ADMIN).json == {"paused": False}
    assert client.post("/sleep?level=2", **ADMIN).json == {"is_sleeping": True}
    assert client.post("/wake_up?tags=weights&tags=kv_cache", **ADMIN).json == {"is_sleeping": True}
    assert client.post("/reset_prefix_cache", **ADMIN).json == {"reset": True}
    assert client.get("/is_paused", **ADMIN).json == {"is_paused": True}
    assert calls == [
        ("pause", True, True),
        ("resume",),
        ("sleep", 2, None),
        ("wake_up", ["weights", "kv_cache"]),
        ("is_sleeping",),
        ("reset_prefix_cache", False),
        ("is_paused",),
    ]
    assert client.post("/sleep?level=3", **ADMIN).error["param"] == "level"
    assert client.post("/pause?clear_cache=perhaps", **ADMIN).error["param"] == "clear_cache"
    core.calls["pause"] = lambda *args: False  # a resume came first
    assert client.post("/pause", **ADMIN).json == {"paused": False}
    del core.calls["resume"]
    assert client.post("/resume", **ADMIN).status == 500


def test_a_prefix(serve: Callable[..., Client]) -> None:
    """Proxies cut it off, or do not."""
    client = serve(root_path="/llm/")
    for path in ("/v1/models", "/llm/v1/models", "/health", "/llm/health"):
        assert client.get(path).status == 200
    assert client.get("/llmv1/models").status == client.get("/llm/llm/v1/models").status == 404


@pytest.mark.parametrize("given", ["mine", "a" * 256, "x; y=1", "\xe9", "../../etc", "cmpl-1"])
def test_request_ids_are_repeated(client: Client, core: FakeCore, given: str) -> None:
    """They are a part of the response's id, which is another one each time."""
    for target in ("/v1/completions", "/tokenize", "/nothing"):
        answer = client.post(target, {"prompt": "w5"}, **{"x-request-id": given})
        assert answer.headers["x-request-id"] == given
        if target == "/v1/completions":
            plain = re.sub(r"[^A-Za-z0-9_.-]", "_", given)[:64]
            again = client.post(target, {"prompt": "w5"}, **{"x-request-id": given})
            for name in (answer.json["id"], again.json["id"]):
                assert re.fullmatch(f"cmpl-{re.escape(plain)}-[0-9a-f]{{32}}", name)
            assert answer.json["id"] != again.json["id"]


def test_a_request_id_in_the_body(client: Client, core: FakeCore) -> None:
    """It becomes a part of the id, too, unless the header does."""
    name = client.post("/v1/completions", {"prompt": "w5", "request_id": "a/b c"}).json["id"]
    assert re.fullmatch("cmpl-a_b_c-[0-9a-f]{32}", name)
    assert core.expect(Submit).requests[0].request_id == name
    both = {"x-request-id": "header"}
    name = client.post("/v1/completions", {"prompt": "w5", "request_id": "body"}, **both).json["id"]
    assert name.startswith("cmpl-header-")
    plain = client.post("/v1/completions", {"prompt": "w5", "request_id": ""}).json["id"]
    assert re.fullmatch("cmpl-[0-9a-f]{32}", plain)
    assert not client.app.state.service.open


@pytest.mark.parametrize("given", ["", "a" * 257, "a\nb", "a\x00", "\x7f"])
def test_request_ids_that_cannot_be_repeated(client: Client, given: str) -> None:
    answer = client.post("/v1/completions", {"prompt": "w5"}, **{"x-request-id": given})
    assert answer.status == 200 and len(answer.headers["x-request-id"]) == 32


class Stamp:
    """A middleware of the user's."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            await send(message)

        await self.app(scope, receive, stamped)


async def stamp(request: Request, call_next: Any) -> Response:
    """Another."""
    response: Response = await call_next(request)
    response.headers["x-stamp-2"] = "function"
    return response


def test_middleware(serve: Callable[..., Client]) -> None:
    client = serve(middleware=[f"{__name__}.Stamp", f"{__name__}.stamp"])
    headers = client.get("/v1/models").headers
    assert (headers["x-stamp"], headers["x-stamp-2"]) == ("class", "function")
    for name in ("nowhere.Thing", f"{__name__}.Nothing", "json", f"{__name__}.KEYS"):
        with pytest.raises(ValueError, match="middleware"):
            serve(middleware=[name])


def test_one_line_per_request(serve: Callable[..., Client], core: FakeCore, caplog: Any) -> None:
    core.auto = True
    caplog.set_level(logging.INFO, "pagewire.server")
    client = serve(max_log_len=4, tool_call_parser="none")
    answer = client.post("/v1/completions", {"prompt": "w5 w6"}, **{"x-request-id": "mine\xe9 x=1"})
    (record,) = caplog.records
    facts = json.loads(JsonFormatter().format(record))
    assert facts["id"] == answer.json["id"] and facts["request_id"] == "mine\xe9 x=1"
    assert (facts["status"], facts["tokens_in"], facts["tokens_out"]) == (200, 2, 3)
    assert facts["finish"] == "length" and facts["prompt"] == "w5 w"
    assert "\n" not in record.getMessage() and 'request_id="mine\xe9 x=1"' in record.getMessage()
    client.post("/v1/completions", {"prompt": "w5", "n": 0})
    assert "status=400" in caplog.records[-1].getMessage() and "n must be" in caplog.records[-1].getMessage()
    caplog.clear()
    quiet: Any = {"tool_call_parser": "none"}  # what is found of the model is logged, too
    serve(disable_log_requests=True, **quiet).post("/v1/completions", {"prompt": "w5"})
    serve(**quiet).get("/v1/models")
    assert not caplog.records


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_to_the_first_token(
    serve: Callable[..., Client], core: FakeCore, caplog: Any, stream: bool
) -> None:
    """In the log and in a header, also of an answer that is only told when it is whole."""
    caplog.set_level(logging.INFO, "pagewire.server")
    client = serve()

    async def play() -> None:
        call = client.call("POST", "/v1/completions", {"prompt": "w5", "stream": stream})
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        timing = RequestTiming(arrived=5.0, scheduled=6.0, first_token=7.0, finished=9.0)
        core.tokens(request.key, [7], finish_reason="length", timing=timing)
        answers.append(await call.answer())

    answers: list[Answer] = []
    client.run(play)
    assert 2000 <= caplog.records[-1].facts["ttft_ms"] < 3000
    stages = dict(stage.split(";dur=") for stage in answers[0].headers["server-timing"].split(", "))
    assert list(stages) == ["body", "prepare", "submit", "queue", "prefill", "decode", "deliver"]
    assert stages["submit"] == "0.0"  # on the clock of another machine
    assert stages["queue"] == stages["prefill"] == "1000.0"


def test_load_counts_what_is_open(serve: Callable[..., Client], core: FakeCore) -> None:
    client = serve()

    async def play() -> list[int]:
        calls = [client.call("POST", "/v1/completions", {"prompt": "w5"}) for _ in range(3)]
        before = (await client.call("GET", "/load").answer()).json["server_load"]
        for call in calls:
            call.hang_up()
            await call.task
        return [before, (await client.call("GET", "/load").answer()).json["server_load"]]

    assert client.run(play) == [3, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70000},
        {"max_request_bytes": 0},
        {"root_path": "llm"},
        {"ssl_certfile": "x"},
        {"enable_auto_tool_choice": True, "tool_call_parser": "none"},
        {"drain_seconds": -1.0},
        {"middleware": ["nowhere.Thing"]},
        {"api_key": [""]},
        {"api_key": ["k", " "]},
        {"max_connections": 0},
        {"max_connections": 2**40},
        {"max_connections_per_address": 0},
        {"head_seconds": -1.0},
        {"allowed_origins": ["https://chat.example/"]},
        {"allowed_origins": ["chat.example"]},
        {"enable_admin": True, "host": "0.0.0.0"},
        {"enable_admin": True, "allowed_origins": ["*"]},
    ],
)
def test_bad_options(engine: AsyncLLM, options: Any) -> None:
    with pytest.raises(ValueError):
        Client(engine, **options)
    assert ServerOptions().keys() == []


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_is_no_key(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """It would start an open server, when its owner meant to give a key."""
    monkeypatch.setenv("PAGEWIRE_API_KEY", value)
    with pytest.raises(ValueError, match="PAGEWIRE_API_KEY must not be empty"):
        Client(engine)
    with pytest.raises(ValueError, match="PAGEWIRE_API_KEY must not be empty"):
        Client(engine, api_key=["k"])
