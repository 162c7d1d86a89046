"""Adapters over HTTP: addressed as models, loaded from below one folder only, unloaded while they are used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.requests.learned_prompts import PromptAdapters
from pagewire.frontend.server.serving.adapters import id_of, modules_of
from pagewire.ipc.wire.embeddings import EmbeddingsInfo
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.messages import EngineInfo, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client

ADMIN = {"X-Pagewire-Admin": "1"}
ENDPOINTS = {
    "/v1/completions": {"prompt": "w2", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w2"}]},
    "/v1/responses": {"input": "w2"},
}


@pytest.fixture
def engine_info(engine_info: EngineInfo) -> EngineInfo:
    """An engine that serves adapters."""
    return msgspec.structs.replace(engine_info, lora=LoRAConfig(max_loras=4))


class Registry:
    """What the fake core knows of adapters."""

    def __init__(self, core: FakeCore) -> None:
        self.added: dict[str, tuple[Any, ...]] = {}
        self.removed: list[int] = []
        self.entries: list[dict[str, Any]] = []
        core.auto = True
        core.calls |= {
            "adapters": lambda: self.entries,
            "register_adapter": self.register,
            "remove_lora": lambda lora_id: self.removed.append(lora_id) or True,
        }

    def register(self, name: str, *rest: Any) -> bool:
        if "broken" in str(rest[1]):
            raise ValueError("adapter 'broken': its rank is 99")
        self.added[name] = rest
        return True


@pytest.fixture
def registry(core: FakeCore, engine: AsyncLLM) -> Registry:
    return Registry(core)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of adapters, and one beside it."""
    for name in ("root/sql", "root/code", "root/broken", "outside"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    return tmp_path / "root"


def adapter_in(core: FakeCore) -> str | None:
    """The name of the adapter of the request that the core gets next."""
    (request,) = core.expect(Submit).requests
    return None if request.adapter is None else request.adapter.name


def load(client: Client, name: str, path: str, **more: Any) -> Answer:
    body = {"lora_name": name, "lora_path": path, **more}
    return client.post("/v1/load_lora_adapter", body, **ADMIN)


def test_modules_are_given_as_name_and_path_or_as_json() -> None:
    first, second = modules_of(["sql=/a=b", '{"name": "code", "path": "/c", "base_model_name": "m"}'])
    assert (first.name, first.path, first.base_model_name) == ("sql", "/a=b", None)
    assert (second.name, second.path, second.base_model_name) == ("code", "/c", "m")
    for wrong in ("sql", "=path", "sql=", '{"name": "sql"}', '{"name": "a", "path": "b", "rank": 1}'):
        with pytest.raises(ValueError, match="lora_modules"):
            modules_of([wrong])
    with pytest.raises(ValueError, match="two adapters are called 'a'"):
        modules_of(["a=b", "a=c"])


def test_adapters_are_models(
    serve: Callable[..., Client], core: FakeCore, registry: Registry, root: Path
) -> None:
    registry.entries = [{"name": "of-another-server", "adapter_id": 7, "path": "/elsewhere"}]
    client = serve(lora_modules=[f"sql={root}/sql"])
    assert registry.added["sql"][:2] == (id_of("sql"), f"{root}/sql")
    cards = {card["id"]: card for card in client.get("/v1/models").json["data"]}
    assert list(cards) == ["fake", "of-another-server", "sql"]
    assert (cards["sql"]["parent"], cards["sql"]["root"]) == ("fake", f"{root}/sql")
    assert cards["fake"]["parent"] is None
    assert client.get("/v1/models/sql").json == cards["sql"]
    assert client.get("/v1/models/none").status == 404
    for path, body in ENDPOINTS.items():
        for name, adapter in (("sql", "sql"), ("of-another-server", "of-another-server"), ("fake", None)):
            answer = client.post(path, body | {"model": name})
            assert (answer.status, answer.json["model"]) == (200, name)
            assert adapter_in(core) == adapter
        refused = client.post(path, body | {"model": "none"})
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert client.post("/tokenize", {"prompt": "w2", "model": "sql"}).json["tokens"] == [2]


def test_a_server_that_may_not_list_adapters_offers_its_own(
    serve: Callable[..., Client], core: FakeCore, registry: Registry, root: Path
) -> None:
    def refuse() -> None:
        raise PermissionError("adapters needs the right 'read'")

    core.calls["adapters"] = refuse
    cards = serve(lora_modules=[f"sql={root}/sql"]).get("/v1/models").json["data"]
    assert [card["id"] for card in cards] == ["fake", "sql"]


def test_a_server_does_not_start_with_an_adapter_that_cannot_be_read(
    serve: Callable[..., Client], registry: Registry, root: Path
) -> None:
    with pytest.raises(ValueError, match="its rank is 99"):
        serve(lora_modules=[f"broken={root}/broken"])
    with pytest.raises(ValueError, match="no adapter folder"):
        serve(lora_modules=["gone=/no/such/folder"])
    with pytest.raises(ValueError, match="'fake' is a name of the model"):
        serve(lora_modules=[f"fake={root}/sql"])
    with pytest.raises(ValueError, match="lora_root: /no/such/folder is not a folder"):
        serve(enable_admin=True, lora_root="/no/such/folder")
    with pytest.raises(ValueError, match="lora_root needs enable_admin"):
        serve(lora_root=str(root))


def test_adapters_and_prompt_adapters_are_models_side_by_side(
    serve: Callable[..., Client], core: FakeCore, engine: AsyncLLM, registry: Registry, root: Path
) -> None:
    engine.session.intake.prompt_adapters = PromptAdapters(EmbeddingsInfo(size=4, adapters=True))
    (root / "tuned").mkdir()
    save_file({"prompt_embeddings": torch.ones(3, 4)}, root / "tuned" / "adapter_model.safetensors")
    (root / "tuned" / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    options: dict[str, Any] = {
        "prompt_adapters": [f"tuned={root}/tuned"],
        "enable_admin": True,
        "lora_root": str(root),
    }
    client = serve(lora_modules=[f"sql={root}/sql"], **options)
    cards = client.get("/v1/models").json["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("fake", None),
        ("sql", "fake"),
        ("tuned", "fake"),
    ]
    assert (cards[0]["max_model_len"] - cards[2]["max_model_len"], cards[2]["root"]) == (3, f"{root}/tuned")
    for path, body in ENDPOINTS.items():
        for name, num_virtual_tokens in (("sql", 0), ("tuned", 3), ("fake", 0)):
            answer = client.post(path, body | {"model": name})
            assert (answer.status, answer.json["model"]) == (200, name)
            (request,) = core.expect(Submit).requests
            assert sum(medium.num_tokens for medium in request.prompt.media) == num_virtual_tokens
            assert (request.adapter is None) == (name != "sql")
    assert client.post("/tokenize", {"prompt": "w2", "model": "tuned"}).json["tokens"] == [2]
    refused = load(client, "tuned", "code")
    assert refused.status == 400 and "or of a prompt adapter" in refused.error["message"]
    with pytest.raises(ValueError, match="'tuned' is a name of the model or of a prompt adapter"):
        serve(lora_modules=[f"tuned={root}/sql"], **options)


def test_operators_load_and_unload_below_the_root(
    serve: Callable[..., Client], core: FakeCore, registry: Registry, root: Path
) -> None:
    client = serve(enable_admin=True, lora_root=str(root))
    assert client.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "sql"}).status == 403
    card = load(client, "sql", "sql").json
    assert (card["id"], card["root"], card["parent"]) == ("sql", f"{root}/sql", "fake")
    assert client.post("/v1/completions", {"model": "sql", "prompt": "w2"}).status == 200
    assert adapter_in(core) == "sql"
    assert load(client, "sql", "code").error["code"] == "name_taken"
    assert load(client, "sql", str(root / "code"), load_inplace=True).json["root"] == f"{root}/code"
    assert load(client, "bad", "broken").error["message"] == "adapter 'broken': its rank is 99"
    assert load(client, "none", "none").status == 400
    unload = {"lora_name": "sql"}
    assert client.post("/v1/unload_lora_adapter", unload, **ADMIN).json == {"unloaded": True}
    assert registry.removed == [id_of("sql")]
    assert client.post("/v1/unload_lora_adapter", unload, **ADMIN).error["code"] == "model_not_found"
    assert client.post("/v1/completions", {"model": "sql", "prompt": "w2"}).status == 404


def test_a_path_outside_of_the_root_is_refused_whether_it_exists_or_not(
    serve: Callable[..., Client], registry: Registry, root: Path
) -> None:
    client = serve(enable_admin=True, lora_root=str(root))
    outside = root.parent / "outside"
    (root / "link").symlink_to(outside)
    (root / "half").mkdir()
    (root / "half" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (root / "circle").symlink_to(root / "circle")
    messages = set()
    for path in (str(outside), "../outside", "../none", "/etc", "link", "half", "sql/../../outside"):
        answer = load(client, "a", path)
        assert (answer.status, answer.error["code"]) == (403, "path_not_allowed"), path
        messages.add(answer.error["message"].replace(path, ""))
    assert len(messages) == 1
    for path in ("circle", "a\0b", "x" * 5000):
        assert load(client, "a", path).status in (400, 403, 422)
    assert not registry.added
    without_root = serve(enable_admin=True)
    assert "without --lora-root" in load(without_root, "a", "sql").error["message"]


def test_an_engine_without_adapters(core: FakeCore, engine: AsyncLLM, serve: Callable[..., Client]) -> None:
    engine.session.info = msgspec.structs.replace(engine.info, lora=None)
    with pytest.raises(ValueError, match="this engine serves no adapters: start it with --enable-lora"):
        serve(lora_modules=["a=/b"])
    assert len(serve().get("/v1/models").json["data"]) == 1
