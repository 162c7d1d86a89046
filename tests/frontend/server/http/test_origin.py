"""Pages of other origins: by `Origin`, by DNS rebinding, and at the endpoints for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.origin import (
    MOST_KNOWN,
    OriginCheck,
    is_allowed_host,
    is_allowed_origin,
)
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client

PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type,x-pagewire-admin",
}
ADMIN = {"x-pagewire-admin": "1"}
EVIL = "https://evil.example"


@pytest.mark.parametrize("options", [{}, {"host": "0.0.0.0"}, {"uds": "/x.sock"}])
def test_pages_of_other_origins_are_refused(serve: Callable[..., Client], options: dict[str, str]) -> None:
    """Without a key, and before anything is done: a page need not read the answer to do harm."""
    client = serve(**options)
    for origin in (
        EVIL,
        "null",
        "http://localhost:8000",
        "http://127.0.0.1.evil.example",
        "file://",
        "x",
        "",
    ):
        for method, target in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("OPTIONS", "/v1/models")):
            headers = {"origin": origin} | (PREFLIGHT if method == "OPTIONS" else {})
            answer = client.request(method, target, {"prompt": "w5"}, headers)
            assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed"), (origin, target)
            assert not [name for name in answer.headers if name.startswith("access-control")]
            assert "x-request-id" in answer.headers


def test_the_server_s_own_page_is_not(client: Client) -> None:
    for host, origin in (
        ("localhost", "http://localhost"),
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost:80", "http://localhost"),
        ("LOCALHOST:8000", "https://localhost:8000"),  # behind a proxy with TLS
    ):
        answer = client.post("/v1/completions", {"prompt": "w5"}, host=host, origin=origin)
        assert answer.status == 200, (host, origin)
    assert client.get("/").status == client.get("/page/page.js").status == 200


def test_other_origins_may_be_allowed(serve: Callable[..., Client]) -> None:
    some = serve(allowed_origins=["https://chat.example", "app://chat"])
    answer = some.get("/v1/models", origin="https://chat.example")
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    preflight = some.request("OPTIONS", "/v1/models", headers=PREFLIGHT | {"origin": "app://chat"})
    assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == "app://chat"
    assert some.get("/v1/models", origin=EVIL).status == 403
    assert some.get("/v1/models", origin="https://chat.example.evil.example").status == 403
    everybody = serve(allowed_origins=["*"])
    assert everybody.get("/v1/models", origin=EVIL).headers["access-control-allow-origin"] == "*"


def test_with_a_key_pages_lack_the_key(serve: Callable[..., Client]) -> None:
    """The browser asks before it sends one, and is not allowed to."""
    client = serve(api_key=["k"])
    assert client.request("OPTIONS", "/v1/models", headers=PREFLIGHT | {"origin": EVIL}).status == 401
    answer = client.get("/v1/models", origin=EVIL, authorization="Bearer k")
    assert answer.status == 200 and "access-control-allow-origin" not in answer.headers
    asked = serve(api_key=["k"], allowed_origins=["*"])
    assert asked.request("OPTIONS", "/v1/models", headers=PREFLIGHT | {"origin": EVIL}).status == 200


def test_names_of_others_are_refused_on_loopback(serve: Callable[..., Client]) -> None:
    """A page whose name points to this machine, by DNS rebinding, is of the same origin as the server."""
    client = serve()
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "x",
    ):
        answer = client.get("/v1/models", host=host, origin=f"http://{host}")
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed"), host
        assert "--allowed-hosts" in answer.error["message"]
    for host in (
        "localhost",
        "localhost.:1",
        "a.localhost",
        "127.0.0.1:8000",
        "192.168.1.2",
        "[::1]",
        "[fe80::1]:8",
    ):
        assert client.get("/v1/models", host=host).status == 200, host


def test_which_names_are_checked(serve: Callable[..., Client]) -> None:
    assert serve(api_key=["k"]).get("/v1/models", host="a.example", authorization="Bearer k").status == 200
    assert serve(host="0.0.0.0").get("/v1/models", host="a.example").status == 200
    assert serve(uds="/x.sock").get("/v1/models", host="a.example").status == 200
    some = serve(allowed_hosts=["A.example", "*.b.example"], api_key=["k"])
    for host, status in (
        ("a.example:8000", 200),
        ("x.a.example", 403),
        ("x.b.example", 200),
        ("b.example", 403),
        ("xb.example", 403),
        ("localhost", 200),
        ("evil.example", 403),
    ):
        assert some.get("/v1/models", host=host, authorization="Bearer k").status == status, host
        assert some.get("/v1/models", host=host).status == (403 if status == 403 else 401)
    assert serve(allowed_hosts=["*"]).get("/v1/models", host="a.example").status == 200


def test_what_is_allowed_once_is_remembered_as_a_host_only(serve: Callable[..., Client]) -> None:
    client = serve(allowed_origins=["https://chat.example"])
    for _ in range(2):
        assert client.get("/v1/models").status == 200
        assert client.get("/v1/models", host="evil.example").status == 403
        assert client.get("/v1/models", origin=EVIL).status == 403
        assert client.get("/v1/models", origin="https://chat.example").status == 200
    check = OriginCheck(client.app, ServerOptions(allowed_origins=["https://chat.example"]))
    origin = [(b"origin", b"https://chat.example")]
    for _ in range(2):
        assert status_of(check, origin, "1.0") == 200
        assert status_of(check, origin, "1.1") == 400
    for number in range(200):
        assert status_of(check, [(b"host", b"10.0.0.%d" % number)], "1.1") == 200
    assert len(check._known) == MOST_KNOWN


def status_of(check: OriginCheck, headers: list[tuple[bytes, bytes]], version: str) -> int:
    """The status of a request with exactly these headers; 200: it was passed on."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def passed(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    check.app = passed
    asyncio.run(
        check({"type": "http", "path": "/", "headers": headers, "http_version": version}, receive, send)
    )
    return int(sent[0]["status"])


@pytest.mark.parametrize("host", ["a b", "a/b", "a@b", "[::1", "a:b", "a:1:2", "a\x00", "é", "a#b", "a\\b"])
def test_a_host_must_be_one(client: Client, host: str) -> None:
    answer = client.get("/v1/models", host=host)
    assert (answer.status, answer.error["code"]) == (400, "invalid_host")


def test_operators_send_a_header_where_no_key_is_needed(serve: Callable[..., Client], core: FakeCore) -> None:
    paused: list[bool] = []
    core.calls["pause"] = lambda *args: paused.append(True) or True
    client = serve(enable_admin=True)
    for method, target in (("POST", "/pause"), ("POST", "/sleep"), ("GET", "/is_paused"), ("POST", "/abort")):
        answer = client.request(method, target, {"request_id": "x"})
        assert (answer.status, answer.error["code"]) == (403, "admin_header_missing"), target
        assert "X-Pagewire-Admin: 1" in answer.error["message"]
    assert not paused
    assert client.post("/pause", **ADMIN).json == {"paused": True}
    assert client.post("/pause", **ADMIN, origin=EVIL).status == 403
    preflight = client.request("OPTIONS", "/pause", headers=PREFLIGHT | {"origin": EVIL})
    assert preflight.status == 403 and "access-control-allow-headers" not in preflight.headers
    with_key = serve(enable_admin=True, api_key=["k"], host="0.0.0.0")
    assert with_key.post("/pause", **ADMIN).status == 401
    assert with_key.post("/pause", authorization="Bearer k").status == 200
    assert len(paused) == 2


def test_comparisons() -> None:
    assert not is_allowed_host("", [])
    assert not is_allowed_host("[::1].evil.example", [])
    assert is_allowed_origin("http://a:80", "a", []) and is_allowed_origin("https://a", "a:443", [])
    assert not is_allowed_origin("http://a:443", "a", [])
    assert not is_allowed_origin("http://", "", []) and not is_allowed_origin("null", "null", [])
    assert is_allowed_origin("null", "a", ["null"])
