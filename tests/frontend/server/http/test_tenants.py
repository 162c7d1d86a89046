"""Keys with names: what a tenant may do, what it has in flight, and that it learns nothing of others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pagewire.frontend.api import off_loop
from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.api.off_loop import OffLoopThreads
from pagewire.frontend.server.http.auth import ApiKeys
from pagewire.frontend.server.http.tenants import ApiTenant
from pagewire.ipc.tenants import current_tenant
from pagewire.ipc.wire.messages import Abort, EngineInfo, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Call, Client
from tests.frontend.server.openai.test_beams import logprobs_of

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
ALICE, BOB, ROOT = ({"authorization": f"Bearer {name}-secret-key"} for name in ("alice", "bob", "root"))


class KeyFile:
    """A file of keys in plain text: `name` has the key `name`-secret-key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(alice="", bob="", root="admin")

    def write(self, **rights: str) -> None:
        """Replace the file, as an editor does."""
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{name} {name}-secret-key {words}\n" for name, words in rights.items()))
        new.chmod(0o600)
        new.rename(self.path)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "api-keys")


@pytest.fixture
def keyed(serve: Callable[..., Client], keys: KeyFile, core: FakeCore) -> Callable[..., Client]:
    """Makes servers with the key file, on a core that answers by itself: `keyed(auto=False, enable_admin=True)`."""

    def make(auto: bool = True, **options: Any) -> Client:
        core.auto = auto
        return serve(api_key_file=str(keys.path), **options)

    return make


def tenant(client: Client, name: str = "alice") -> ApiTenant:
    (api_keys,) = (entry.kwargs["keys"] for entry in client.app.user_middleware if "keys" in entry.kwargs)
    assert isinstance(api_keys, ApiKeys)
    found = api_keys.tenant(f"{name}-secret-key".encode())
    assert found is not None
    return found


def in_flight(client: Client, name: str = "alice") -> tuple[int, int]:
    found = tenant(client, name)
    return found.num_requests, found.num_tokens


# ---------------------------------------------------------------- keys


def test_a_key_gives_its_name_to_requests_and_to_the_log(
    keyed: Callable[..., Client], core: FakeCore, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "pagewire.server")
    client = keyed()
    assert client.post(COMPLETIONS, {"prompt": ["w5", "w6", "w7"], "n": 2}, **ALICE).status == 200
    requests = core.expect(Submit).requests
    assert [(request.tenant, request.rank) for request in requests] == [
        ("alice", 0),
        ("alice", 2),
        ("alice", 4),
    ]
    assert caplog.records[-1].facts["key"] == "alice"
    assert "secret" not in caplog.text


def test_slow_work_is_done_in_the_turn_of_the_keys_name(
    keyed: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    class Recorder(OffLoopThreads):
        async def run(self, work: Callable[[], Any]) -> Any:
            names.append(current_tenant.get())
            return await super().run(work)

    monkeypatch.setattr(off_loop, "LARGE_TEXT", 4)
    monkeypatch.setattr(off_loop, "_large_texts", Recorder("large texts", 1, 1))
    client = keyed()
    for headers in (ALICE, BOB):
        assert client.post("/tokenize", {"prompt": "w5 w6"}, **headers).json["tokens"] == [5, 6]
    assert names == ["alice", "bob"]


def test_keys_of_the_command_line_have_numbers(serve: Callable[..., Client], core: FakeCore) -> None:
    core.auto = True
    client = serve(api_key=["alice-secret-key", "bob-secret-key"])
    for number, headers in enumerate((ALICE, BOB), 1):
        client.post(COMPLETIONS, {"prompt": "w5"}, **headers)
        assert core.expect(Submit).requests[0].tenant == f"key-{number}"
    assert serve().post(COMPLETIONS, {"prompt": "w5"}).status == 200
    assert core.expect(Submit).requests[0].tenant == ""


def test_a_changed_file_counts_at_once(
    keyed: Callable[..., Client], keys: KeyFile, core: FakeCore, caplog: Any
) -> None:
    client = keyed()
    keys.write(alice="", carol="")
    assert client.get("/v1/models", **BOB).status == 401
    assert client.get("/v1/models", **ALICE).status == 200
    assert client.get("/v1/models", authorization="Bearer carol-secret-key").status == 200
    for damage in (lambda: keys.path.write_text("alice"), keys.path.unlink):
        caplog.clear()
        damage()
        for _ in range(3):
            assert client.get("/v1/models", **ALICE).status == 200
            assert client.get("/v1/models", **BOB).status == 401
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1 and "stay as they were" in errors[0].getMessage()
    keys.write(bob="")
    assert (client.get("/v1/models", **ALICE).status, client.get("/v1/models", **BOB).status) == (401, 200)


def test_files_that_a_server_does_not_start_with(
    serve: Callable[..., Client], keys: KeyFile, tmp_path: Path
) -> None:
    keys.path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        serve(api_key_file=str(keys.path))
    with pytest.raises(ValueError, match=r"api_key_file: .*No such file"):
        serve(api_key_file=str(tmp_path / "nothing"))
    keys.write(alice="priority=1")
    with pytest.raises(ValueError, match=r"alice has a priority, but .* --scheduling-policy priority"):
        serve(api_key_file=str(keys.path))
    keys.path.write_text("key-1 some-secret-key")
    with pytest.raises(ValueError, match="the name key-1 is that of a key of --api-key"):
        serve(api_key_file=str(keys.path), api_key=["other"])


# ---------------------------------------------------------------- prefixes


def salts(client: Client, core: FakeCore, headers: dict[str, str], *given: str | None) -> list[str | None]:
    """The salts with which the core gets requests of a key that give these."""
    found = []
    for salt in given:
        body = {"prompt": "w5"} | ({} if salt is None else {"cache_salt": salt})
        assert client.post(COMPLETIONS, body, **headers).status == 200
        found.append(core.expect(Submit).requests[0].prompt.cache_salt)
    return found


def test_each_key_has_a_cache_of_its_own(keyed: Callable[..., Client], core: FakeCore) -> None:
    client = keyed()
    alice, bob = (salts(client, core, headers, None, "x", "x", "y") for headers in (ALICE, BOB))
    for plain, first, again, other in (alice, bob):
        assert plain and first == again and len({plain, first, other}) == 3
    assert not set(alice) & set(bob)
    assert salts(keyed(), core, ALICE, None, "x") == alice[:2]  # another server with the same file
    assert salts(client, core, BOB, *(salt for salt in alice if salt)) != alice  # it cannot be given
    assert client.post(COMPLETIONS, {"prompt": "w5", "cache_salt": ""}, **ALICE).status == 400


def test_one_key_alone_has_no_salt(serve: Callable[..., Client], core: FakeCore) -> None:
    core.auto = True
    one = {"api_key": ["alice-secret-key"]}
    assert salts(serve(**one), core, ALICE, None, "x") == [None, "x"]
    assert None not in salts(serve(**one, cache_salt_by_key=True), core, ALICE, None)


@pytest.mark.parametrize(("salted", "shown"), [(None, 2), (True, 2), (False, 0)])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", RESPONSES])
def test_cached_tokens_are_hidden_where_prefixes_are_shared(
    keyed: Callable[..., Client], core: FakeCore, salted: bool | None, shown: int, path: str
) -> None:
    client = keyed(auto=False, cache_salt_by_key=salted)
    message = [{"role": "user", "content": "w5 w6 w7"}]
    body = {COMPLETIONS: {"prompt": "w5 w6 w7"}, RESPONSES: {"input": "w5 w6 w7"}}.get(
        path, {"messages": message}
    )

    async def play() -> Answer:
        call = client.call("POST", path, body, ALICE)
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        drafts = {"num_drafts": 4, "num_accepted": 1}
        core.tokens(request.key, [5], finish_reason="length", num_cached_tokens=2, **drafts)
        return await call.answer()

    usage = client.run(play).json["usage"]
    details = usage["input_tokens_details"] if path == RESPONSES else usage["prompt_tokens_details"]
    assert details["cached_tokens"] == shown
    if path != RESPONSES:  # how fast an output comes may depend on those of others, too
        accepted = {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 3} if shown else None
        assert usage.get("completion_tokens_details") == accepted


# ---------------------------------------------------------------- limits

Ends = Callable[[Client, FakeCore, Call, int], Coroutine[Any, Any, None]]


async def finish(client: Client, core: FakeCore, call: Call, key: int) -> None:
    core.tokens(key, [5], finish_reason="length")
    assert (await call.answer()).status == 200


async def fail(client: Client, core: FakeCore, call: Call, key: int) -> None:
    core.tokens(key, [], finish_reason="error", error="it broke")
    assert (await call.answer()).status == 500


async def leave(client: Client, core: FakeCore, call: Call, key: int) -> None:
    call.hang_up()
    await call.task


async def leave_midway(client: Client, core: FakeCore, call: Call, key: int) -> None:
    core.tokens(key, [5])
    await call.message()
    call.hang_up()
    await call.task


async def pass_deadline(client: Client, core: FakeCore, call: Call, key: int) -> None:
    assert (await call.answer()).status == 408


async def abort(client: Client, core: FakeCore, call: Call, key: int) -> None:
    (name,) = client.app.state.service.open
    assert client.app.state.service.abort(name)
    assert (await call.answer()).status == 499


@pytest.mark.parametrize(
    ("end", "fields"),
    [
        (finish, {}),
        (finish, {"stream": True}),
        (fail, {}),
        (leave, {}),
        (leave, {"stream": True}),
        (leave_midway, {"stream": True}),
        (pass_deadline, {"timeout": 1.0}),
        (abort, {}),
    ],
)
def test_whatever_ends_a_request_gives_back_what_it_had(
    keyed: Callable[..., Client], keys: KeyFile, core: FakeCore, end: Ends, fields: dict[str, Any]
) -> None:
    keys.write(alice="max_requests=1 max_tokens=10", bob="")
    client = keyed(auto=False)
    body = {"prompt": "w5 w6", "max_tokens": 7} | fields

    async def play() -> None:
        call = client.call("POST", COMPLETIONS, body, ALICE)
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        assert in_flight(client) == (1, 9)
        refused = await client.call("POST", COMPLETIONS, body, ALICE).answer()
        assert refused.status == 429 and refused.headers["retry-after"] == "1"
        assert "max_requests=1" in refused.error["message"]
        await end(client, core, call, request.key)
        assert in_flight(client) == (0, 0)

    client.run(play)


@pytest.mark.parametrize("body", [b"{", {"prompt": []}, {"prompt": "w5", "n": 0}, {"prompt": [1] * 5000}])
def test_requests_that_are_refused_hold_nothing(
    keyed: Callable[..., Client], keys: KeyFile, body: Any
) -> None:
    keys.write(alice="max_requests=1")
    client = keyed()
    for _ in range(3):
        assert client.post(COMPLETIONS, body, **ALICE).status in (400, 422)
    assert in_flight(client) == (0, 0)


def test_tokens_in_flight_are_limited(keyed: Callable[..., Client], keys: KeyFile, core: FakeCore) -> None:
    """Those of all prompts, and all that may be generated."""
    keys.write(alice="max_tokens=40", bob="")
    client = keyed(auto=False)

    async def play() -> None:
        first = client.call("POST", COMPLETIONS, {"prompt": ["w5", "w6 w7"], "n": 2, "max_tokens": 8}, ALICE)
        requests = (await asyncio.to_thread(core.expect, Submit)).requests
        assert in_flight(client) == (1, 1 + 2 + 4 * 8)
        more = await client.call("POST", COMPLETIONS, {"prompt": "w5", "max_tokens": 8}, ALICE).answer()
        assert more.status == 429 and "9 tokens, and 35 are in flight" in more.error["message"]
        alone = await client.call("POST", COMPLETIONS, {"prompt": "w5", "max_tokens": 40}, ALICE).answer()
        assert alone.status == 400 and "more than this key may have in flight" in alone.error["message"]
        assert in_flight(client) == (1, 35)
        other = client.call("POST", COMPLETIONS, {"prompt": "w5", "max_tokens": 400}, BOB)
        await asyncio.to_thread(core.expect, Submit)
        assert in_flight(client, "bob") == (1, 401)
        for request in requests:
            for index in range(2):
                core.tokens(request.key, [5], index, finish_reason="length")
        assert (await first.answer()).status == 200
        assert in_flight(client) == (0, 0)
        other.hang_up()
        await other.task

    client.run(play)


def test_the_steps_of_a_beam_search_do_not_add_up(
    keyed: Callable[..., Client], keys: KeyFile, core: FakeCore
) -> None:
    """Each step is a request to the core, which takes the place of the one before."""
    core.logprobs = logprobs_of
    core.answer = lambda request, index: [2]
    keys.write(alice="max_tokens=20", bob="")
    client = keyed()
    body = {"prompt": "w5 w6", "n": 2, "use_beam_search": True, "max_tokens": 4, "ignore_eos": True}
    answer = client.post(COMPLETIONS, body, **ALICE)
    assert answer.status == 200 and core.expect(Submit).requests[0].tenant == "alice"
    assert in_flight(client) == (0, 0)


@pytest.mark.parametrize("ends", ["done", "cancel", "delete"])
def test_a_response_in_the_background_counts_until_it_ends(
    keyed: Callable[..., Client], keys: KeyFile, core: FakeCore, ends: str
) -> None:
    keys.write(alice="max_requests=1", bob="")
    client = keyed(auto=False)

    async def play() -> None:
        answer = await client.call("POST", RESPONSES, {"input": "w5", "background": True}, ALICE).answer()
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        assert in_flight(client)[0] == 1
        assert (await client.call("POST", RESPONSES, {"input": "w5"}, ALICE).answer()).status == 429
        name = answer.json["id"]
        if ends == "done":
            core.tokens(request.key, [5], finish_reason="stop")
            while (await client.call("GET", f"{RESPONSES}/{name}", None, ALICE).answer()).json[
                "status"
            ] != "completed":
                pass
        elif ends == "cancel":
            assert (
                await client.call("POST", f"{RESPONSES}/{name}/cancel", None, ALICE).answer()
            ).status == 200
        else:
            assert (await client.call("DELETE", f"{RESPONSES}/{name}", None, ALICE).answer()).status == 200
        await asyncio.sleep(0)  # callbacks of the task that has ended
        assert in_flight(client) == (0, 0)

    client.run(play)


def test_counts_outlive_a_change_of_the_file(
    keyed: Callable[..., Client], keys: KeyFile, core: FakeCore
) -> None:
    client = keyed(auto=False)

    async def play() -> None:
        call = client.call("POST", COMPLETIONS, {"prompt": "w5"}, ALICE)
        await asyncio.to_thread(core.expect, Submit)
        keys.write(alice="max_requests=1")
        assert (await client.call("POST", COMPLETIONS, {"prompt": "w5"}, ALICE).answer()).status == 429
        keys.write(bob="")
        assert (await client.call("POST", COMPLETIONS, {"prompt": "w5"}, ALICE).answer()).status == 401
        keys.write(alice="max_requests=1")
        assert in_flight(client)[0] == 1
        call.hang_up()
        await call.task
        assert in_flight(client) == (0, 0)

    client.run(play)


# ---------------------------------------------------------------- rights


def test_priorities_by_key(
    keyed: Callable[..., Client], keys: KeyFile, core: FakeCore, engine: AsyncLLM, engine_info: EngineInfo
) -> None:
    keys.write(alice="priority=5 best_priority=2", bob="")
    engine.info.scheduling_policy = "priority"
    client = keyed()
    for given, headers, counted in (
        (None, ALICE, 5),
        (2, ALICE, 2),
        (9, ALICE, 9),
        (None, BOB, 0),
        (-7, BOB, -7),
    ):
        assert client.post(COMPLETIONS, {"prompt": "w5", "priority": given}, **headers).status == 200
        assert core.expect(Submit).requests[0].priority == counted
    for path, body in ((COMPLETIONS, {"prompt": "w5"}), (RESPONSES, {"input": "w5"})):
        refused = client.post(path, body | {"priority": 1}, **ALICE)
        assert refused.status == 403 and "best_priority=2" in refused.error["message"]


def test_admin_endpoints_want_the_right(keyed: Callable[..., Client], core: FakeCore) -> None:
    core.calls |= {"pause": lambda *args: True, "is_paused": lambda: True, "abort_request": lambda *args: 0}
    client = keyed(enable_admin=True)
    for method, path, body in (
        ("POST", "/pause", None),
        ("GET", "/is_paused", None),
        ("POST", "/abort", {"request_id": "x"}),
    ):
        refused = client.request(method, path, body, ALICE)
        assert refused.status == 403 and refused.error["code"] == "admin_required"
        assert client.request(method, path, body, ROOT).status == 200


def test_a_tenant_sees_its_own_metrics_only(keyed: Callable[..., Client], core: FakeCore) -> None:
    def row(**labels: str) -> dict[str, Any]:
        return {"name": "x", "type": "gauge", "documentation": "x", "labels": labels, "value": 1}

    core.calls["metrics"] = lambda: [row(), row(tenant="alice"), row(tenant="bob"), row(tenant="(others)")]
    client = keyed()
    assert client.get("/metrics", **ALICE).body.decode().count("\nx{") == 1
    assert 'tenant="alice"' in client.get("/metrics", **ALICE).body.decode()
    assert client.get("/metrics", **ROOT).body.decode().count("\nx{") == 3


def test_stored_responses_belong_to_their_tenant(keyed: Callable[..., Client], core: FakeCore) -> None:
    """For others they do not exist: neither to read, end or delete, nor to continue or refer to."""
    client = keyed()
    hers = client.post(RESPONSES, {"input": "w5 w6"}, **ALICE).json
    target, item = f"{RESPONSES}/{hers['id']}", {"type": "item_reference", "id": hers["output"][0]["id"]}
    unknown = client.get(f"{RESPONSES}/resp_{'0' * 32}", **BOB)
    for method, path in (
        ("GET", target),
        ("GET", target + "?stream=true"),
        ("GET", target + "/input_items"),
        ("POST", target + "/cancel"),
        ("DELETE", target),
    ):
        for headers in (BOB, ROOT):
            refused = client.request(method, path, None, headers)
            assert refused.status == unknown.status == 404
            assert refused.error["code"] == unknown.error["code"]
    follow_up = {"input": "w7", "previous_response_id": hers["id"]}
    for path in (RESPONSES, RESPONSES + "/input_tokens"):
        assert client.post(path, follow_up, **BOB).status == 404
        assert client.post(path, follow_up, **ALICE).status == 200
        assert client.post(path, {"input": [item]}, **BOB).status in (400, 404)
        assert client.post(path, {"input": [item]}, **ALICE).status == 200
    assert client.request("DELETE", target, None, ALICE).status == 200


def test_an_abort_ends_what_a_tenant_submitted(keyed: Callable[..., Client], core: FakeCore) -> None:
    """An operator may end the requests of all."""
    client = keyed(auto=False, enable_admin=True)

    async def play() -> None:
        call = client.call("POST", COMPLETIONS, {"prompt": "w5"}, ALICE)
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        body = {"request_id": request.request_id}
        assert (await client.call("POST", "/abort", body, BOB).answer()).status == 403
        assert not call.task.done()
        assert (await client.call("POST", "/abort", body, ROOT).answer()).json["aborted"]
        assert (await call.answer()).status == 499
        await asyncio.to_thread(core.expect, Abort)

    client.run(play)
