"""Several models under one address: a request's `model` says which one it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.wiring import create_app
from pagewire.ipc.wire.messages import Submit
from pagewire.ipc.wire.pooling import PoolingInfo
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client

PROMPT = [5, 6]


def gauge(model: str) -> dict[str, Any]:
    return {
        "name": "pagewire:num_requests_running",
        "type": "gauge",
        "documentation": "",
        "labels": {"model_name": model},
        "value": 1,
    }


@pytest.fixture
def cores(new_core: Callable[..., FakeCore]) -> list[FakeCore]:
    """A core that generates, and one that pools."""
    first, second = new_core("first"), new_core("second")
    first.auto = second.auto = True
    pooling = PoolingInfo(["embed"], "LAST", 2)
    second.info = msgspec.structs.replace(second.info, served_model_names=["embedder"], pooling=pooling)
    for core in (first, second):
        core.calls["metrics"] = lambda name=core.info.served_model_names[0]: [gauge(name)]
    return [first, second]


@pytest.fixture
def engines(cores: list[FakeCore]) -> Iterator[list[AsyncLLM]]:
    engines = [AsyncLLM.attach(core.address) for core in cores]
    yield engines
    for engine in engines:
        engine.shutdown()


def test_requests_go_where_their_model_is(cores: list[FakeCore], engines: list[AsyncLLM]) -> None:
    client = Client(engines[0], engines[1:])
    assert [entry["id"] for entry in client.get("/v1/models").json["data"]] == ["fake", "embedder"]
    assert client.get("/v1/models/embedder").json["max_model_len"] == 4096
    assert client.get("/v1/models/other").status == 404
    for named in ({"model": "fake"}, {}):
        answer = client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3} | named)
        assert answer.json["model"] == "fake"

    found = client.post("/v1/embeddings", {"input": PROMPT, "model": "embedder"}).json
    assert found["model"] == "embedder" and found["data"][0]["embedding"] == [2.0, 11.0]
    for path, body, status, text in (
        ("/v1/embeddings", {"input": PROMPT}, 400, "generates text"),
        ("/v1/completions", {"prompt": PROMPT, "model": "embedder"}, 400, "pools and does not generate"),
        ("/v1/completions", {"prompt": PROMPT, "model": "other"}, 404, "no model"),
    ):
        refused = client.post(path, body)
        assert refused.status == status and text in refused.error["message"]
    assert client.post("/tokenize", {"prompt": "w5 w6", "model": "embedder"}).json["count"] == 2


DOORS = (
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5"}]}),
    ("/v1/responses", {"input": "w5"}),
    ("/v1/embeddings", {"input": PROMPT, "model": "embedder"}),
    ("/pooling", {"input": PROMPT, "model": "embedder"}),
    ("/v1/score", {"text_1": "w5", "text_2": "w6", "model": "embedder"}),
    ("/v1/rerank", {"query": "w5", "documents": ["w6"], "model": "embedder"}),
)


@pytest.mark.parametrize(("path", "body"), DOORS)
def test_a_priority_is_refused_alike_everywhere(engines: list[AsyncLLM], path: str, body: Any) -> None:
    """Without `--scheduling-policy priority` it would have no effect."""
    client = Client(engines[0], engines[1:])
    for priority, text in ((5, "priority=5 has no effect"), (2**70, "priority must be in")):
        refused = client.post(path, body | {"priority": priority})
        assert refused.status == 400 and text in refused.error["message"]
        assert refused.error["param"] == "priority"
    assert client.post(path, body | {"priority": 0}).status == 200


def test_the_priority_of_a_key_is_for_engines_that_schedule_by_it(
    cores: list[FakeCore], engines: list[AsyncLLM], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice alice-secret-key priority=5 best_priority=2\n")
    keys.chmod(0o600)
    engines[0].info.scheduling_policy = "priority"
    client = Client(engines[0], engines[1:], api_key_file=str(keys))
    for core, (path, body) in ((cores[0], DOORS[0]), (cores[1], DOORS[3])):
        assert client.post(path, body, authorization="Bearer alice-secret-key").status == 200
        assert core.expect(Submit).requests[0].priority == (5 if core is cores[0] else 0)


def test_operators_see_all_of_them(cores: list[FakeCore], engines: list[AsyncLLM]) -> None:
    client = Client(engines[0], engines[1:], enable_admin=True)
    text = client.get("/metrics").body.decode()
    assert all(f'num_requests_running{{model_name="{name}"}} 1.0' in text for name in ("fake", "embedder"))
    for core, sleeps in zip(cores, (False, True), strict=True):
        core.calls["is_sleeping"] = lambda sleeps=sleeps: sleeps
    for query, expected in (("", False), ("?model=embedder", True)):
        answer = client.get(f"/is_sleeping{query}", **{"X-Pagewire-Admin": "1"})
        assert answer.json == {"is_sleeping": expected}
    assert client.get("/is_sleeping?model=other", **{"X-Pagewire-Admin": "1"}).status == 404
    assert client.get("/health").status == 200
    cores[1].calls["check_health"] = lambda: {"alive": False, "ready": False, "reason": "worn out"}
    assert "worn out" in Client(engines[0], engines[1:]).get("/health").error["message"]


def test_two_models_of_one_name_are_refused(core: FakeCore) -> None:
    engines = [AsyncLLM.attach(core.address) for _ in range(2)]
    try:
        with pytest.raises(ValueError, match="two models have the name"):
            create_app(engines[0], ServerOptions(), engines[1:])
    finally:
        for engine in engines:
            engine.shutdown()
