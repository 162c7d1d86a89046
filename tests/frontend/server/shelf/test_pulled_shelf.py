"""Pulled models behind Ollama's endpoints: the hub is one on loopback, the cores are fake."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.serving.service import Service
from pagewire.frontend.server.shelf import opening
from pagewire.frontend.server.shelf.loader import EngineLoader
from pagewire.frontend.server.shelf.model_shelf import MemoryEstimate
from pagewire.frontend.server.shelf.options import ShelfOptions
from pagewire.ipc.files import pull as pulling
from pagewire.ipc.files import pulled
from pagewire.ipc.files.hub_names import HubName
from pagewire.ipc.options.engine_args import EngineArgs
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer
from tests.frontend.server.shelf.test_services import ADMIN, ShelfClient
from tests.ipc.files.hub_server import use_hub
from tests.ipc.files.stores import HubHandler, Store

WEIGHTS = bytes(range(256)) * 2000
NAME = "hf:a/b:Q4_K_M"
PROMPT = {"prompt": "w5", "raw": True, "stream": False, "options": {"num_predict": 2}}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("PAGEWIRE_PULLED_DIR", str(tmp_path / "pulled"))
    monkeypatch.setattr(pulling, "RETRY_SECONDS", 0.0)
    files = {"a/b/M-Q4_K_M.gguf": WEIGHTS, "a/b/M-Q8_0.gguf": WEIGHTS * 2, "a/c/README.md": b"text"}
    with Store(files).serving(HubHandler) as store:
        use_hub(store, monkeypatch)
        yield store


@pytest.fixture
def new_client(
    hub: Store, new_core: Callable[..., FakeCore], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ShelfClient]:
    """Makes clients of a server with one model, and those that were pulled."""
    cores: dict[str, FakeCore] = {}

    def start(self: EngineLoader, name: str) -> Service:
        core = cores[name] = new_core(f"core-{len(cores)}")
        core.auto = True
        core.info = msgspec.structs.replace(core.info, served_model_names=self.models[name].served_model_name)
        return Service(AsyncLLM.attach(core.address), self._options)

    monkeypatch.setattr(EngineLoader, "start", start)

    def new(*models: str, **options: Any) -> ShelfClient:
        services = opening.open_shelf(
            {model: EngineArgs(model=f"path/{model}") for model in models},
            ShelfOptions(pulled=True),
            ServerOptions(**({"enable_admin": True} | options)),
            1 << 30,
            lambda args: MemoryEstimate(1),
            lambda name: EngineArgs(model=name),
        )
        return ShelfClient(services)

    return new


def lines_of(answer: Answer) -> list[Any]:
    assert answer.status == 200 and answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.body.decode().splitlines()]


async def tags(client: ShelfClient) -> dict[str, Any]:
    return {model["name"]: model for model in (await client.ask("GET", "/api/tags")).json["models"]}


def test_a_model_is_pulled_used_and_removed(new_client: Callable[..., ShelfClient]) -> None:
    client = new_client()

    async def main() -> None:
        none = await client.ask("POST", "/api/generate", PROMPT)
        assert none.status == 404 and "none yet: pull one" in none.json["error"]
        lines = lines_of(await client.ask("POST", "/api/pull", {"model": "hf.co/a/b"}, ADMIN))
        assert [line["status"] for line in (lines[0], *lines[-2:])] == [
            "pulling manifest",
            "writing manifest",
            "success",
        ]
        files = [line for line in lines if "digest" in line]
        assert files[-1]["completed"] == files[-1]["total"] == len(WEIGHTS)
        assert files[-1]["digest"].startswith("sha256:") and files[-1]["status"].startswith("pulling ")
        listed = (await tags(client))[NAME]
        assert (listed["size"], listed["details"]["format"]) == (len(WEIGHTS), "gguf")
        assert listed["details"]["quantization_level"] == "Q4_K_M"
        assert (await client.ask("GET", "/api/ps")).json["models"] == []
        for name in (NAME, "hf:a/b", "hf.co/a/b:latest", "hf.co/a/b:q4_k_m", "huggingface.co/a/b"):
            answer = await client.ask("POST", "/api/generate", PROMPT | {"model": name})
            assert answer.status == 200 and answer.json["model"] == NAME
            openai = await client.ask(
                "POST", "/v1/completions", {"model": name, "prompt": "w5", "max_tokens": 2}
            )
            assert openai.status == 200 and openai.json["model"] == NAME
        (running,) = (await client.ask("GET", "/api/ps")).json["models"]
        assert (running["name"], running["size"], running["digest"]) == (NAME, len(WEIGHTS), listed["digest"])
        assert await client.states() == {NAME: "idle"}
        gone = await client.ask("DELETE", "/api/delete", {"model": "hf.co/a/b"}, ADMIN)
        assert gone.status == 200 and await tags(client) == {} and pulled.pulled_models() == []
        assert (await client.ask("POST", "/api/generate", PROMPT | {"model": NAME})).status == 404
        while NAME in client.services.shelf.table.entries:
            await asyncio.sleep(0.001)
        assert client.services.shelf.loaded == {}
        again = await client.ask("DELETE", "/api/delete", {"model": NAME}, ADMIN)
        assert again.status == 404 and "was not pulled" in again.json["error"]
        await client.services.close()

    client.run(main)


def test_a_request_outlives_the_removal_of_its_model(new_client: Callable[..., ShelfClient]) -> None:
    client = new_client()

    async def main() -> None:
        await client.ask("POST", "/api/pull", {"model": NAME, "stream": False}, ADMIN)
        async with client.services.use(NAME) as service:
            assert (await client.ask("DELETE", "/api/delete", {"name": NAME}, ADMIN)).status == 200
            assert client.services.shelf.loaded[NAME] is service and await tags(client) == {}
            assert (await client.ask("POST", "/api/pull", {"name": NAME, "stream": False}, ADMIN)).json == {
                "status": "success"
            }
            assert await client.states() == {NAME: "ready"}
        assert await client.states() == {NAME: "idle"}
        await client.services.close()

    client.run(main)


def test_clients_of_one_pull_come_and_go(new_client: Callable[..., ShelfClient], hub: Store) -> None:
    """One that leaves takes nothing from the others; once the last has left, the pull ends."""
    client, gates = new_client(), [threading.Event(), threading.Event()]
    hub.gates = [(100_000, gates[0]), (100_000, gates[1])]

    async def main() -> None:
        body = {"model": NAME}
        first = client.call("POST", "/api/pull", body, ADMIN)
        second = client.call("POST", "/api/pull", body, ADMIN)
        for call in (first, second):
            start = await call.message()
            assert b"pulling manifest" in (await call.message())["body"]
        first.hang_up()
        await asyncio.wait((first.task,))
        third = client.call("POST", "/api/pull", body, ADMIN)
        gates[0].set()
        for call, begun in ((second, start), (third, None)):
            assert lines_of(await call.answer(begun))[-1] == {"status": "success"}
        assert len(hub.reads) == 1
        alone = client.call("POST", "/api/pull", {"model": "hf:a/b:Q8_0"}, ADMIN)
        while len(hub.reads) == 1:
            await asyncio.sleep(0.001)
        alone.hang_up()
        await asyncio.wait((alone.task,))
        gates[1].set()
        lines = lines_of(await client.ask("POST", "/api/pull", {"model": "hf:a/b:Q8_0"}, ADMIN))
        assert lines[-1] == {"status": "success"} and set(await tags(client)) == {NAME, "hf:a/b:Q8_0"}
        await client.services.close()

    client.run(main)


def test_models_that_another_process_pulls_and_removes(new_client: Callable[..., ShelfClient]) -> None:
    client = new_client("one")

    async def main() -> None:
        for name in ("Q4_K_M", "Q8_0"):
            await asyncio.to_thread(
                pulling.pull, HubName("a/b", name), None, lambda step: None, threading.Event()
            )
        assert set(await client.states()) == {"one", NAME, "hf:a/b:Q8_0"}
        answer = await client.ask("POST", "/api/generate", PROMPT | {"model": "hf.co/a/b:q8_0"})
        assert answer.status == 200
        await asyncio.to_thread(pulled.remove, HubName("a/b", "Q8_0"))
        assert set(await client.states()) == {"one", NAME}
        assert set(await new_client("one").states()) == {"one", NAME}
        refused = await client.ask("DELETE", "/api/delete", {"model": "one"}, ADMIN)
        assert refused.status == 400 and "is no model of the Hugging Face hub" in refused.json["error"]
        await client.services.close()

    client.run(main)


def test_what_fails_is_said(new_client: Callable[..., ShelfClient], hub: Store) -> None:
    client = new_client("one")

    async def main() -> None:
        for name, text in (("hf:a/none", "no model 'a/none'"), ("hf:a/c:Q4_0", "a/c has no 'Q4_0'")):
            lines = lines_of(await client.ask("POST", "/api/pull", {"model": name}, ADMIN))
            assert lines[0] == {"status": "pulling manifest"} and text in lines[-1]["error"]
            whole = await client.ask("POST", "/api/pull", {"model": name, "stream": False}, ADMIN)
            assert whole.status == 404 and text in whole.json["error"]
        for body, text in (
            ({}, "model is required"),
            ({"model": "llama3.2"}, "write hf:owner/repository:Q4_K_M"),
            ({"model": "hf:../b"}, "is no name of a model"),
        ):
            for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
                refused = await client.ask(method, path, body, ADMIN)
                assert refused.status == 400 and text in refused.json["error"]
        with pulled.lock_model(HubName("a/b", "Q4_K_M")):
            busy = await client.ask("DELETE", "/api/delete", {"model": NAME}, ADMIN)
            assert busy.status == 409 and "is being pulled" in busy.json["error"]
        await client.services.close()

    client.run(main)


def test_only_operators_pull_and_remove(new_client: Callable[..., ShelfClient]) -> None:
    client, without = new_client("one"), new_client("one", enable_admin=False)
    calls = [("POST", "/api/pull"), ("DELETE", "/api/delete")]

    async def main() -> None:
        for method, path in calls:
            refused = await client.ask(method, path, {"model": NAME})
            assert refused.status == 403 and "X-Pagewire-Admin" in refused.json["error"]
            absent = await without.ask(method, path, {"model": NAME}, ADMIN)
            assert absent.status == 400 and "--pulled and --enable-admin" in absent.json["error"]
        for path, advice in (("copy", "--models FILE"), ("create", "--models FILE"), ("push", "hf upload")):
            refused = await client.ask("POST", f"/api/{path}", {}, ADMIN)
            assert refused.status == 400 and advice in refused.json["error"]
        assert (await tags(client)).keys() == {"one"}
        await client.services.close()
        await without.services.close()

    client.run(main)


def test_a_key_without_the_right_pulls_nothing(
    new_client: Callable[..., ShelfClient], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("reader key-of-a-reader\noperator key-of-an-operator admin\n")
    keys.chmod(0o600)
    client = new_client("one", api_key_file=str(keys))

    async def main() -> None:
        for key, status in (("key-of-a-reader", 403), ("key-of-an-operator", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
                answer = await client.ask(method, path, {"model": NAME}, headers)
                assert answer.status == status
        await client.services.close()

    client.run(main)
