"""What a client can make of the stored responses: no endless stream, and no memory that is not counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.frontend.server.responses.items import read_input
from pagewire.frontend.server.responses.store import FOLLOWED_AT_ONCE, ResponseStore, StoredResponse
from pagewire.ipc.wire.messages import Abort, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client
from tests.frontend.server.responses.test_responses import new_response

PATH = "/v1/responses"
LIMIT = 20_000


@pytest.mark.parametrize("after", ["-2", "-1000000000000000", str(2**63), "9" * 5000, "1e3", ""])
def test_only_sequence_numbers_are_followed(client: Client, after: str) -> None:
    """With a negative one the same events came again and again, and the server did nothing else any more."""
    created = client.post(PATH, {"input": "w5", "background": True, "stream": True})
    name = json.loads(created.body.split(b"data: ", 1)[1].split(b"\n", 1)[0])["response"]["id"]
    answer = client.get(f"{PATH}/{name}?stream=true&starting_after={after}")
    assert (answer.status, answer.error["param"]) == (400, "starting_after")
    assert len(answer.body) < 1000
    for fine in ("-1", "0", str(2**63 - 1)):
        assert client.get(f"{PATH}/{name}?stream=true&starting_after={fine}").status == 200


def test_all_events_come_in_pieces_and_once() -> None:
    async def follow(after: int) -> list[bytes]:
        stored = StoredResponse(new_response(status="completed"), [], [])
        stored.add_events([b"%d;" % number for number in range(3 * FOLLOWED_AT_ONCE)])
        return [piece async for piece in stored.follow(after)]

    pieces = asyncio.run(follow(9))
    assert b"".join(pieces) == b"".join(b"%d;" % number for number in range(10, 3 * FOLLOWED_AT_ONCE))
    assert max(piece.count(b";") for piece in pieces) == FOLLOWED_AT_ONCE
    with pytest.raises(ValueError, match="at least -1"):
        asyncio.run(follow(-2))


def test_many_responses_of_one_tenant_do_not_push_out_those_of_another() -> None:
    store = ResponseStore(10 * LIMIT)
    own = StoredResponse(new_response("resp_own"), read_input("x" * 5000), owner="alice")
    assert store.put(own)
    for number in range(50):
        other = StoredResponse(new_response(f"resp_{number}"), read_input("x" * 20_000), owner="mallory")
        assert store.put(other)
    assert store.get("resp_own", "alice") is own
    assert store.get("resp_49", "mallory") is other and len(store) < 20
    for number in range(50):  # of those of one tenant, the least recently used go
        assert store.put(
            StoredResponse(new_response(f"resp_a{number}"), read_input("x" * 20_000), owner="alice")
        )
    assert store.get("resp_a49", "alice") and store.get("resp_49", "mallory")
    assert not store._has("resp_own", "alice") and store.num_bytes <= 10 * LIMIT


def test_growth_is_counted_and_drops_idle_responses_only() -> None:
    async def play() -> None:
        store = ResponseStore(LIMIT)
        idle = StoredResponse(new_response("resp_idle"), read_input("x" * 5000))
        busy = StoredResponse(new_response("resp_busy"), read_input("x"))
        busy.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        assert store.put(idle) and store.put(busy)
        before = store.num_bytes
        assert store.grow(busy, 1000) and store.num_bytes == before + 1000 and len(store) == 2
        assert store.grow(busy, LIMIT - before) and len(store) == 1
        assert not store.grow(busy, LIMIT) and store.num_bytes <= LIMIT
        assert not store.grow(idle, 1)  # it is not stored any more
        assert store.get("resp_busy") is busy
        store.forget("resp_busy")
        assert store.num_bytes == 0
        busy.task.cancel()

    asyncio.run(play())


@pytest.mark.parametrize("stream", [False, True])
def test_a_background_response_ends_where_the_store_is_full(
    serve: Callable[..., Client], core: FakeCore, stream: bool
) -> None:
    client = serve(response_store_bytes=LIMIT)
    tokens = list(range(2, 64)) * 5

    async def play() -> None:
        call = client.call("POST", PATH, {"input": "w5", "background": True, "stream": stream})
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        for _ in range(100):  # over 100 kB of text
            core.tokens(request.key, tokens)
        await call.answer()  # of a stream: to its end
        await asyncio.to_thread(core.expect, Abort)
        kept: dict[str, Any] = {"status": "in_progress"}
        while kept["status"] == "in_progress":
            kept = (await client.call("GET", f"{PATH}/{request.request_id}").answer()).json
        assert kept["status"] == "failed" and "--response-store-bytes" in kept["error"]["message"]
        assert len(json.dumps(kept)) < LIMIT

    client.run(play)
