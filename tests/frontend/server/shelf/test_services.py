"""Models on demand behind the server's endpoints, on cores that do nothing but what a test tells them to."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.serving.service import Service
from pagewire.frontend.server.shelf import opening
from pagewire.frontend.server.shelf.loader import EngineLoader
from pagewire.frontend.server.shelf.model_shelf import MemoryEstimate
from pagewire.frontend.server.shelf.options import ShelfOptions
from pagewire.frontend.server.shelf.services import ShelvedServices, keep_alive_seconds
from pagewire.frontend.server.shelf.table import ModelState
from pagewire.frontend.server.wiring import application
from pagewire.ipc.options.engine_args import EngineArgs
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client

PROMPT = {"prompt": [5, 6], "max_tokens": 3}
ADMIN = {"X-Pagewire-Admin": "1"}


class ShelfClient(Client):
    """Calls the application on models that are loaded on demand."""

    def __init__(self, services: ShelvedServices) -> None:
        self.services = services
        self.app = application(services)

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """A request, in the test's own loop."""
        return await self.call(method, path, body, headers).answer()

    async def states(self) -> dict[str, str]:
        """The states of all models, as /v1/models says them."""
        cards = (await self.ask("GET", "/v1/models")).json["data"]
        return {card["id"]: card["state"] for card in cards}

    async def until(self, name: str, state: ModelState) -> None:
        while self.services.shelf.state(name) is not state:
            await asyncio.sleep(0.001)


@pytest.fixture
def new_client(
    new_core: Callable[..., FakeCore], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ShelfClient]:
    """Makes clients of two models, of which one fits into memory."""

    def start(self: EngineLoader, name: str) -> Service:
        core = new_core(f"{name}-{len(starts)}")
        starts.append(name)
        core.auto = True
        core.info = msgspec.structs.replace(core.info, served_model_names=[name])
        return Service(AsyncLLM.attach(core.address), self._options)

    starts: list[str] = []
    monkeypatch.setattr(EngineLoader, "start", start)

    def new(*, capacity: int = 1, shelf: ShelfOptions | None = None, **options: Any) -> ShelfClient:
        models = {"one": EngineArgs(model="path/one"), "two": EngineArgs(model="path/two")}
        services = opening.open_shelf(
            models,
            shelf or ShelfOptions(),
            ServerOptions(**options),
            capacity,
            lambda args: MemoryEstimate(1, "too large" if capacity == 0 else None),
        )
        return ShelfClient(services)

    return new


def test_a_request_loads_its_model_in_place_of_another(new_client: Callable[..., ShelfClient]) -> None:
    client = new_client()

    async def main() -> None:
        assert await client.states() == {"one": "absent", "two": "absent"}
        card = (await client.ask("GET", "/v1/models/two")).json
        assert card["root"] == "path/two" and card["max_model_len"] is None
        assert (await client.ask("GET", "/health")).status == 200
        shown = (await client.ask("GET", "/page/models")).json
        assert [(model["name"], model["max_model_len"]) for model in shown] == [("one", None), ("two", None)]
        for name in ("two", "one", "two"):
            answer = await client.ask("POST", "/v1/completions", PROMPT | {"model": name})
            assert answer.status == 200 and answer.json["model"] == name
            assert (await client.states())[name] == "idle"
        answer = await client.ask("POST", "/v1/completions", PROMPT)  # without a name: the first
        assert answer.json["model"] == "one"
        assert await client.states() == {"one": "idle", "two": "absent"}
        for path in ("/v1/completions", "/tokenize"):
            refused = await client.ask("POST", path, {"prompt": "w5", "model": "three"})
            assert refused.status == 404 and "served: one, two" in refused.error["message"]
        assert (await client.ask("GET", "/v1/models/three")).status == 404
        counted = await client.ask("POST", "/tokenize", {"prompt": "w5 w6", "model": "two:latest"})
        assert counted.json["count"] == 2
        await client.services.shelf.close()

    client.run(main)


def test_a_model_that_ended_leaves_nothing(new_client: Callable[..., ShelfClient]) -> None:
    client = new_client()

    async def main() -> None:
        ended = []
        for name in ("one", "two", "one", "two"):
            answer = await client.ask("POST", "/v1/completions", PROMPT | {"model": name})
            assert answer.status == 200 and (await client.ask("GET", "/health")).status == 200
            ended.append(weakref.ref(client.services.shelf.loaded[name]))
        await client.services.shelf.close()
        await client.ask("GET", "/health")
        gc.collect()
        assert [ref() for ref in ended] == [None] * 4

    client.run(main)


def test_ollama_lists_and_keeps_models(new_client: Callable[..., ShelfClient]) -> None:
    client = new_client(shelf=ShelfOptions(idle_sleep=3600.0))

    async def main() -> None:
        assert {model["name"] for model in (await client.ask("GET", "/api/tags")).json["models"]} == {
            "one",
            "two",
        }
        assert (await client.ask("GET", "/api/ps")).json["models"] == []
        body = {"model": "one", "prompt": "w5", "raw": True, "stream": False, "options": {"num_predict": 2}}
        for keep, end in (("5m", "20"), (-1, "9999")):
            answer = await client.ask("POST", "/api/generate", body | {"keep_alive": keep})
            assert answer.status == 200 and "warning" not in answer.headers
            (model,) = (await client.ask("GET", "/api/ps")).json["models"]
            assert model["name"] == "one" and model["expires_at"].startswith(end)
        assert (await client.ask("POST", "/api/generate", body | {"keep_alive": 0})).status == 200
        await client.until("one", ModelState.ABSENT)
        ended = await client.ask("POST", "/api/chat", {"model": "two", "keep_alive": 0})
        assert ended.json["done_reason"] == "unload" and set((await client.states()).values()) == {"absent"}
        assert (await client.ask("POST", "/api/chat", {"model": "two"})).json["done_reason"] == "load"
        assert (await client.states())["two"] == "idle"
        assert (await client.ask("POST", "/api/generate", body | {"keep_alive": "soon"})).status == 400
        await client.services.shelf.close()

    client.run(main)


def test_operators_load_and_unload(new_client: Callable[..., ShelfClient]) -> None:
    client = new_client(enable_admin=True)

    async def main() -> None:
        refused = await client.ask("POST", "/models/load", {"model": "two"})
        assert refused.status == 403
        answer = await client.ask("POST", "/models/load", {"model": "two"}, ADMIN)
        assert answer.json["state"] == "idle" and answer.json["model"] == "path/two"
        assert (await client.ask("GET", "/is_paused?model=one", headers=ADMIN)).status == 409
        assert (await client.ask("POST", "/models/load", {"model": "three"}, ADMIN)).status == 404
        assert (await client.ask("POST", "/models/unload", {"model": "two"}, ADMIN)).json[
            "state"
        ] == "stopping"
        await client.until("two", ModelState.ABSENT)
        await client.services.shelf.close()

    client.run(main)
    assert (
        new_client().post("/models/load", {"model": "two"}, **ADMIN).status == 404
    )  # without --enable-admin


def test_what_does_not_fit_is_refused_before_it_is_loaded(new_client: Callable[..., ShelfClient]) -> None:
    client = new_client(capacity=0)
    refused = client.post(
        "/v1/chat/completions", {"model": "one", "messages": [{"role": "user", "content": "w5"}]}
    )
    assert refused.status == 503 and refused.error["code"] == "model_does_not_fit"
    assert "too large" in refused.error["message"] and refused.headers["x-should-retry"] == "false"
    (card, _) = client.get("/v1/models").json["data"]
    assert card["state"] == "absent" and "too large" in card["problem"]


def test_requests_are_refused_while_a_model_starts(new_client: Callable[..., ShelfClient]) -> None:
    client = new_client(shelf=ShelfOptions(while_starting="refuse"))

    async def main() -> None:
        refused = await client.ask("POST", "/v1/completions", PROMPT | {"model": "two"})
        assert refused.status == 503 and refused.headers["retry-after"] == "2"
        await client.until("two", ModelState.IDLE)
        assert (await client.ask("POST", "/v1/completions", PROMPT | {"model": "two"})).status == 200
        await client.services.shelf.close()

    client.run(main)


def test_durations_of_keep_alive() -> None:
    assert [keep_alive_seconds(given) for given in (0, 5, "5m", "1h30m", "1.5s", "300", "0")] == [
        0,
        5,
        300,
        5400,
        1.5,
        300,
        0,
    ]
    assert keep_alive_seconds(-1) == keep_alive_seconds("-1m") == keep_alive_seconds("-1") == float("inf")
    for bad in ("soon", "5 m", "m", "", float("nan")):
        with pytest.raises(APIError, match="keep_alive"):
            keep_alive_seconds(bad)
