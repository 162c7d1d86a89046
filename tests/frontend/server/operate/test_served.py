"""What the page is told of the served models."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.requests.checked_params import USUAL_LENGTH
from pagewire.ipc.wire.media import MediaInfo, MediumInfo
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.model_figures import ModelFigures
from pagewire.ipc.wire.pooling import PoolingInfo
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client

FIGURES = ModelFigures("safetensors", None, 10, 16.0, 20, 40, 100, 30, 8, True, "amx")


def test_each_name_is_described(new_core: Callable[..., FakeCore], engine_info: EngineInfo) -> None:
    core = new_core()
    media = MediaInfo({"image": MediumInfo(5, "<image>", 5, max_tokens=4)})
    names = ["fake", "other"]
    core.info = msgspec.structs.replace(
        engine_info,
        figures=FIGURES,
        served_model_names=names,
        media=media,
        generation_config={"temperature": 0.6, "top_k": 20},
    )
    engine = AsyncLLM.attach(core.address)
    try:
        models = Client(engine).get("/page/models").json
        assert [model["name"] for model in models] == names
        for model in models:
            assert model["parent"] is None and model["tasks"] == [] and model["takes"] == ["image"]
            assert model["max_model_len"] == engine_info.max_model_len
            assert model["num_blocks"] == engine_info.num_blocks
            assert model["defaults"]["temperature"] == 0.6 and model["defaults"]["top_k"] == 20
            assert model["defaults"]["max_tokens"] == USUAL_LENGTH
            assert model["figures"] == msgspec.to_builtins(FIGURES)
    finally:
        engine.shutdown()


def test_a_model_that_pools_has_tasks(new_core: Callable[..., FakeCore], engine_info: EngineInfo) -> None:
    core = new_core()
    core.info = msgspec.structs.replace(engine_info, pooling=PoolingInfo(["embed"], "LAST", 2))
    engine = AsyncLLM.attach(core.address)
    try:
        (model,) = Client(engine).get("/page/models").json
        assert (model["tasks"], model["chats"], model["tools"]) == (["embed"], False, False)
    finally:
        engine.shutdown()


def test_it_needs_a_key(new_core: Callable[..., FakeCore]) -> None:
    engine = AsyncLLM.attach(new_core().address)
    try:
        client = Client(engine, api_key=["secret"])
        assert client.get("/page/models").status == 401
        assert client.get("/page/page.js").status == 200
    finally:
        engine.shutdown()
