"""Conversations that responses are added to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.responses.conversations import ConversationStore
from pagewire.frontend.server.responses.items import read_input
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client
from tests.frontend.server.http.test_tenants import ALICE, BOB, KeyFile

PATH = "/v1/conversations"
MESSAGE = {"type": "message", "role": "user", "content": "w5"}


def begin(client: Client, *items: Any, **headers: str) -> str:
    answer = client.post(PATH, {"items": list(items), "metadata": {"topic": "lists"}}, **headers)
    assert answer.status == 200, answer.body
    assert answer.json["object"] == "conversation" and answer.json["metadata"] == {"topic": "lists"}
    return str(answer.json["id"])


def items(client: Client, name: str, query: str = "?order=asc") -> list[dict[str, Any]]:
    return client.get(f"{PATH}/{name}/items{query}").json["data"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_reads_its_conversation_and_is_added_to_it(
    client: Client, core: FakeCore, stream: bool
) -> None:
    name = begin(client, MESSAGE)
    fields = {"input": "w6", "stream": stream, "max_output_tokens": 3}
    answer = client.post("/v1/responses", fields | {"conversation": name})
    assert answer.status == 200, answer.body
    if not stream:
        assert answer.json["conversation"] == {"id": name}
    (first,) = core.submitted.values()
    assert [item["type"] for item in items(client, name)] == ["message"] * 3
    assert [item["role"] for item in items(client, name)] == ["user", "user", "assistant"]
    assert client.post("/v1/responses", fields | {"conversation": {"id": name}}).status == 200
    second = list(core.submitted.values())[1]
    assert len(second.prompt.token_ids) > len(first.prompt.token_ids)
    assert len(items(client, name)) == 5
    counted = client.post("/v1/responses/input_tokens", {"input": "w6", "conversation": name})
    assert counted.json["input_tokens"] > len(second.prompt.token_ids)


def test_a_response_that_fails_is_not_added(client: Client) -> None:
    name = begin(client, MESSAGE)
    assert client.post("/v1/responses", {"input": "w6", "conversation": name, "top_p": 7}).status == 400
    assert len(items(client, name)) == 1


def test_items_and_metadata_are_changed(client: Client) -> None:
    name = begin(client)
    path = f"{PATH}/{name}"
    added = client.post(
        path + "/items", {"items": [{**MESSAGE, "id": "msg_a"}, {**MESSAGE, "id": "msg_a"}]}
    ).json
    assert added["first_id"] == "msg_a" and added["last_id"] != "msg_a" and len(added["data"]) == 2
    assert [item["id"] for item in items(client, name, "?limit=1")] == [added["last_id"]]
    assert [item["id"] for item in items(client, name, f"?after={added['last_id']}")] == ["msg_a"]
    assert client.get(path + "/items/msg_a").json["content"] == "w5"
    assert client.request("DELETE", path + "/items/msg_a").json["id"] == name
    assert client.get(path + "/items/msg_a").status == 404
    assert client.post(path, {"metadata": {"a": "b"}}).json["metadata"] == {"a": "b"}
    assert client.get(path).json["metadata"] == {"a": "b"}
    deleted = client.request("DELETE", path).json
    assert deleted == {"id": name, "object": "conversation.deleted", "deleted": True}
    assert client.get(path).status == 404


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"conversation": "conv_x"}, 404, "conversation"),
        ({"conversation": {"name": "x"}}, 400, "conversation"),
        ({"conversation": "conv_x", "previous_response_id": "resp_x"}, 400, "conversation"),
    ],
)
def test_what_cannot_be_asked_for(client: Client, fields: dict[str, Any], status: int, param: str) -> None:
    answer = client.post("/v1/responses", {"input": "w5"} | fields)
    assert (answer.status, answer.error["param"]) == (status, param)


def test_bad_items_are_refused(client: Client) -> None:
    assert client.post(PATH, {"items": [{"type": "nonsense"}]}).status == 400
    assert client.post(PATH, {"metadata": {"a": "b" * 1000}}).status == 400
    name = begin(client)
    assert client.post(f"{PATH}/{name}", {"items": [MESSAGE]}).status == 400
    assert client.post(f"{PATH}/{name}/items", {"items": []}).status == 400
    assert client.get(f"{PATH}/{name}/items?after=x").status == 404


def test_tenants_have_their_own(serve: Callable[..., Client], core: FakeCore, tmp_path: Any) -> None:
    keys = KeyFile(tmp_path / "keys")
    core.auto = True
    client = serve(api_key_file=str(keys.path))
    name = begin(client, MESSAGE, **ALICE)
    assert client.get(f"{PATH}/{name}", **ALICE).status == 200
    assert client.get(f"{PATH}/{name}", **BOB).status == 404
    answer = client.post("/v1/responses", {"input": "w5", "conversation": name}, **BOB)
    assert answer.status == 404


def test_memory_is_bounded_and_shared_fairly() -> None:
    store = ConversationStore(50_000)
    own = store.create("alice", {}, read_input("x" * 5000))
    for _ in range(50):
        other = store.create("mallory", {}, read_input("x" * 5000))
    assert store.get(own.id, "alice") is own and store.get(other.id, "mallory") is other
    assert len(store) < 10
    with pytest.raises(APIError, match="response-store-bytes"):
        store.create("alice", {}, read_input("x" * 60_000))
    own.append(read_input("x" * 60_000))
    assert not store.keep(own)
    assert own.id not in store
    assert json.dumps(store.create("alice", {"a": "b"}, []).metadata) == '{"a": "b"}'
