"""The configuration that the core resolves from its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.engine_core import config
from pagewire.engine_core.config import EngineConfig
from pagewire.ipc.embeddings import EmbeddingsInfo
from pagewire.ipc.options import EngineArgs
from pagewire.ipc.pooling import PoolingInfo
from pagewire.ipc.worker_messages import Ready

READY = Ready("Fake", "bfloat16", "cpu", 1000, 128, 64, 1, 1)
MODEL = Path("/models/model")


@pytest.mark.parametrize(
    ("options", "name", "revision"),
    [
        ({"tokenizer_revision": "v2"}, "org/model", "v2"),
        ({"revision": "v1", "tokenizer_revision": "v2"}, "org/model", "v2"),
        ({"tokenizer": "org/tokenizer"}, "org/tokenizer", None),
        ({"tokenizer": "org/tokenizer", "tokenizer_revision": "v2"}, "org/tokenizer", "v2"),
    ],
)
def test_the_tokenizer_and_its_revision(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], name: str, revision: str | None
) -> None:
    calls: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, **source: Any) -> Path:
        assert source["tokenizer_only"]
        calls.append((name, revision))
        return Path("/downloaded")

    monkeypatch.setattr(config, "model_folder", download)
    resolved = EngineConfig(EngineArgs(model="org/model", **options), MODEL, {}, None)
    assert resolved.tokenizer_folder() == Path("/downloaded")
    assert calls == [(name, revision)]
    info = resolved.engine_info(READY)
    assert (info.tokenizer, info.tokenizer_revision) == (name, revision)


def test_the_tokenizer_is_the_models_by_default() -> None:
    resolved = EngineConfig(EngineArgs(model="org/model", revision="v1"), MODEL, {}, None)
    assert resolved.tokenizer_folder() == MODEL
    info = resolved.engine_info(READY)
    assert (info.tokenizer, info.tokenizer_revision) == (str(MODEL), None)


def test_an_encoder_publishes_no_blocks() -> None:
    encoder = msgspec.structs.replace(READY, pooling=PoolingInfo(["embed"], "MEAN", 8, whole_prompts=True))
    args = EngineArgs(model="org/model", kv_events="ipc:///tmp/events")
    with pytest.raises(ValueError, match="kv_events: this model is an encoder"):
        EngineConfig(args, MODEL, {}, None).scheduler_config(encoder)


POOLS = PoolingInfo(tasks=["embed"], size=4, pooling_type="MEAN")


@pytest.mark.parametrize(
    ("ready", "options", "message"),
    [
        (
            {},
            {"enable_prompt_embeds": True},
            "enable_prompt_embeds: Fake looks its tokens up in a way of its own",
        ),
        ({}, {"enable_prompt_adapter": True}, "enable_prompt_adapter: Fake looks its tokens up"),
        ({"embedding_size": 4, "pooling": POOLS}, {"enable_prompt_adapter": True}, "this model pools"),
    ],
)
def test_embeddings_need_a_model_that_takes_them(
    ready: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    resolved = EngineConfig(EngineArgs(**options), MODEL, {}, None)
    with pytest.raises(ValueError, match=message):
        resolved.engine_info(msgspec.structs.replace(READY, **ready))


def test_frontends_are_told_which_embeddings_prompts_may_bring() -> None:
    ready = msgspec.structs.replace(READY, embedding_size=4)
    assert EngineConfig(EngineArgs(), MODEL, {}, None).engine_info(ready).embeddings == EmbeddingsInfo(4)
    options = {"enable_prompt_embeds": True, "enable_prompt_adapter": True}
    args = EngineArgs(**options, max_prompt_adapters=3, max_prompt_adapter_token=9)
    found = EngineConfig(args, MODEL, {}, None).engine_info(ready).embeddings
    assert found == EmbeddingsInfo(4, True, True, 3, 9)
