"""/v1/responses over a WebSocket: the answers of HTTP, and responses that only the connection continues."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.ipc.wire.messages import Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.http.test_protocol import connect, listening
from tests.frontend.server.http.test_websocket import Peer, create

__all__ = ["listening"]  # a fixture

TEMPLATE = "{% for m in messages %}{% for word in (m.content | string).split() %}w5 {% endfor %}{% endfor %}"
VARIABLE = ("sequence_number", "id", "item_id", "created_at", "completed_at", "store")


def without_names(value: Any) -> Any:
    """A value of JSON without what differs from one response to the next."""
    if isinstance(value, dict):
        return {name: without_names(each) for name, each in value.items() if name not in VARIABLE}
    return [without_names(each) for each in value] if isinstance(value, list) else value


def told(events: list[Any]) -> tuple[list[Any], str]:
    """Events without what differs, and the text of their deltas, of which there may be more or fewer."""
    deltas = [event["delta"] for event in events if "delta" in event]
    return without_names([event for event in events if "delta" not in event]), "".join(deltas)


def over_http(port: int, **fields: Any) -> list[Any]:
    """The events of a request over HTTP."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/responses",
        json.dumps(fields | {"stream": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        events = answer.read().decode().split("\n\n")[:-1]
    return [json.loads(event.split("data: ")[1]) for event in events]


def test_the_events_are_those_of_http(listening: Callable[..., Any], core: FakeCore) -> None:
    core.auto, core.reason = True, "stop"
    fields: dict[str, Any] = {
        "input": "w5 w6",
        "instructions": "w7",
        "metadata": {"a": "b"},
        "temperature": 0,
    }
    with listening() as port, connect(port) as client:
        peer = Peer(client)
        peer.send(create(**fields))
        events = peer.events()
        assert told(events) == told(over_http(port, **fields))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        peer.send(create(**fields, stream=True, store=True))
        assert peer.events()[-1]["response"]["store"] is True
        peer.close()


ERRORS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"type": "response.steer"}, 400, "type"),
    ({"type": None}, 400, "type"),
    (create(background=True), 400, "background"),
    (create(stream=False), 400, "stream"),
    (create(stream_id="a"), 400, "stream_id"),
    (create(model="other"), 404, "model"),
    (create(input=[]), 400, "input"),
    (create(input=3), 422, "input"),
    (create(temperature=-1), 400, "temperature"),
    (create(previous_response_id="resp_none"), 404, "previous_response_id"),
]


def test_errors_are_events_and_the_connection_goes_on(listening: Callable[..., Any], core: FakeCore) -> None:
    core.auto, core.reason = True, "stop"
    with listening(any_model_name=False) as port, connect(port) as client:
        peer = Peer(client)
        for message, status, field in ERRORS:
            peer.send(message)
            (event,) = peer.events()
            assert (event["type"], event["status"], event["error"]["param"]) == ("error", status, field), (
                message
            )
        client.sendall(b"\x81\x81\0\0\0\0{")  # a message that is no JSON
        (event,) = peer.events()
        assert event["status"] == 400 and "not valid JSON" in event["error"]["message"]
        peer.send(create())
        assert peer.events()[-1]["type"] == "response.completed"
        peer.close()


def test_what_belongs_to_a_socket_is_refused_over_http(listening: Callable[..., Any], core: FakeCore) -> None:
    with listening() as port, pytest.raises(urllib.error.HTTPError) as caught:
        over_http(port, **create())
    assert caught.value.code == 400 and "over a WebSocket" in caught.value.read().decode()


def test_limits_of_a_key_hold(listening: Callable[..., Any], core: FakeCore, tmp_path: Any) -> None:
    """One request at a time, whatever it comes by."""
    keys = tmp_path / "keys"
    keys.write_text("a secret-a max_requests=1\n")
    keys.chmod(0o600)
    with listening(api_key_file=str(keys)) as port, connect(port) as one, connect(port) as two:
        first, second = (Peer(client, authorization="Bearer secret-a") for client in (one, two))
        first.send(create())
        key = core.expect(Submit).requests[0].key
        second.send(create())
        (error,) = second.events()
        assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
        assert error["headers"] == {"retry-after": "1"}
        core.tokens(key, [7], finish_reason="stop")
        assert first.events()[-1]["type"] == "response.completed"
        first.close()
        second.close()


def test_a_response_that_is_not_stored_is_continued_on_its_connection_alone(
    listening: Callable[..., Any], core: FakeCore
) -> None:
    core.auto, core.reason = True, "stop"
    with listening(chat_template=TEMPLATE) as port, connect(port) as one, connect(port) as two:
        first, second = Peer(one), Peer(two)
        first.send(create(store=False, input="w5"))
        turns = [first.events()[-1]["response"]]
        assert turns[0]["store"] is False
        first.send(create(store=False, input="w6", previous_response_id=turns[0]["id"]))
        turns.append(first.events()[-1]["response"])
        assert turns[1]["usage"]["input_tokens"] > turns[0]["usage"]["input_tokens"]
        first.send(create(store=False, input=[], previous_response_id=turns[1]["id"]))
        assert first.events()[-1]["type"] == "response.completed"
        for turn in turns:
            second.send(create(previous_response_id=turn["id"]))
            (error,) = second.events()
            assert error["error"]["code"] == "previous_response_not_found"
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/responses/{turn['id']}")
            assert caught.value.code == 404
        second.send(create(store=True))
        stored = second.events()[-1]["response"]["id"]
        first.send(create(previous_response_id=stored))
        assert first.events()[-1]["type"] == "response.completed"
        first.close()
        second.close()


def test_nothing_is_left_when_the_connection_has_ended(serve: Callable[..., Any], core: FakeCore) -> None:
    """Of the server's store, by the object that its requests have."""
    core.auto, core.reason = True, "stop"
    from pagewire.frontend.server.responses.store import ResponseStore, StoredResponse
    from pagewire.frontend.server.serving.socket import SocketSession
    from tests.frontend.server.responses.test_responses import new_response

    store, session = ResponseStore(10_000), SocketSession()
    stored = StoredResponse(new_response(), [], socket=session)
    assert store.put(stored)
    session.at_end(lambda: store.forget("resp_1"))
    session.end()
    assert len(store) == store.num_bytes == 0


def test_a_response_without_output_is_continued(listening: Callable[..., Any], core: FakeCore) -> None:
    """It has the core compute its prompt."""
    core.auto, core.reason = True, "stop"
    with listening(chat_template=TEMPLATE) as port, connect(port) as client:
        peer = Peer(client)
        peer.send(create(generate=False, store=False, input="w5", max_output_tokens=50))
        assert core.expect(Submit).requests[0].params.max_tokens == 1
        created, running, ended = peer.events()
        assert [created["type"], running["type"]] == ["response.created", "response.in_progress"]
        assert ended["type"] == "response.completed" and ended["response"]["output"] == []
        assert ended["response"]["status"] == "completed" and ended["response"]["incomplete_details"] is None
        peer.send(create(store=False, input="w6", previous_response_id=ended["response"]["id"]))
        after = peer.events()[-1]["response"]
        assert after["output"] and after["usage"]["input_tokens"] > ended["response"]["usage"]["input_tokens"]
        peer.close()
