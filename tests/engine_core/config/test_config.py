"""The configuration that the core resolves from its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.engine_core.config.config import EngineConfig, first_adapter, pools_by_name
from pagewire.engine_core.states.open import checkpoint_tokens
from pagewire.engine_core.states.state_slots import CHECKPOINT_TOKENS
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.embeddings import EmbeddingsInfo
from pagewire.ipc.wire.pooling import PoolingInfo
from pagewire.ipc.wire.worker_messages import Ready

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

    monkeypatch.setattr("pagewire.engine_core.config.config.model_folder", download)
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


def test_token_0_may_end_a_sequence() -> None:
    assert EngineConfig(EngineArgs(), MODEL, {"eos_token_id": 0}, 7).eos_token_ids == [7, 0]
    assert EngineConfig(EngineArgs(), MODEL, {"eos_token_id": None}, 0).eos_token_ids == [0]


@pytest.mark.parametrize(
    ("architecture", "options", "prepares"),
    [
        ("LlamaForCausalLM", {}, True),
        ("LlamaForCausalLM", {"skip_tokenizer_init": True}, False),
        ("LlamaForCausalLM", {"convert": "embed"}, False),
        ("LlamaForCausalLM", {"runner": "pooling"}, False),
        ("BertModel", {}, False),
        ("BertModel", {"runner": "generate"}, True),
    ],
)
def test_only_what_generates_prepares_for_grammars(
    architecture: str, options: dict[str, Any], prepares: bool
) -> None:
    args = EngineArgs(model="org/model", **options)
    pools = pools_by_name(args, {"architectures": [architecture]})
    assert EngineConfig(args, MODEL, {}, None, pools=pools).prepares_grammars == prepares


def test_an_encoder_publishes_no_blocks() -> None:
    encoder = msgspec.structs.replace(READY, pooling=PoolingInfo(["embed"], "MEAN", 8, whole_prompts=True))
    args = EngineArgs(model="org/model", kv_events="ipc:///tmp/events")
    with pytest.raises(ValueError, match="kv_events: this model is an encoder"):
        EngineConfig(args, MODEL, {}, None).scheduler_config(encoder)


def test_the_layers_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def parallel(stages: int) -> Any:
        args = EngineArgs("demo", pipeline_parallel_size=stages, tensor_parallel_size=2)
        return EngineConfig(args, MODEL, {}, None).worker_config().parallel

    assert (parallel(3).size, parallel(3).stages, parallel(3).num_shards) == (6, 3, 2)
    monkeypatch.setenv("PAGEWIRE_PP_LAYER_PARTITION", "8, 8,9")
    assert parallel(3).layers == (8, 8, 9)
    assert parallel(1).layers == ()
    for text in ("8,8,9,1", "8,0,9", "8,-1,9", "8,8", "many"):
        monkeypatch.setenv("PAGEWIRE_PP_LAYER_PARTITION", text)
        with pytest.raises(ValueError, match="the number of layers of each of 3 stages expected"):
            EngineConfig.resolve(EngineArgs("demo", pipeline_parallel_size=3))


def test_stages_share_the_budget_of_tokens_and_have_a_step_each() -> None:
    def limits(stages: int, **options: Any) -> tuple[int, int, int]:
        args = EngineArgs("demo", pipeline_parallel_size=stages, max_num_batched_tokens=96, **options)
        made = EngineConfig(args, MODEL, {}, None).scheduler_config(READY)
        return made.max_num_batched_tokens, made.depth, made.stages

    assert [limits(n) for n in (1, 2, 3)] == [(96, 2, 1), (48, 2, 2), (32, 3, 3)]
    assert limits(3, async_scheduling=False) == (96, 1, 3)


def test_steps_end_in_time_by_default_and_stages_share_it() -> None:
    def seconds(device: str, stages: int = 1, **options: Any) -> float:
        args = EngineArgs("demo", pipeline_parallel_size=stages, **options)
        args.check()
        ready = msgspec.structs.replace(READY, device=device)
        return EngineConfig(args, MODEL, {}, None).scheduler_config(ready).step_seconds

    assert (seconds("cpu"), seconds("cuda"), seconds("cpu", stages=2)) == (0.2, 0.05, 0.1)
    assert (seconds("cpu", max_step_ms=0), seconds("cuda", max_step_ms=30)) == (0.0, 0.03)
    with pytest.raises(ValueError, match="max_step_ms"):
        seconds("cpu", max_step_ms=-1)


def test_checkpoints_are_as_far_apart_as_their_size_in_kv() -> None:
    def spacing(block_bytes: int, state_bytes: int) -> int:
        sizes = {"bytes_per_block": block_bytes, "num_states": 4, "bytes_per_state": state_bytes}
        ready = msgspec.structs.replace(READY, **sizes)
        return checkpoint_tokens(ready, 16)

    assert [spacing(1600, size) for size in (1600, 1601, 160_000)] == [16, 17, 1600]
    assert spacing(0, 1000) == CHECKPOINT_TOKENS


def test_adapters_that_the_engine_starts_with(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="holds no adapter_config"):
        EngineConfig.resolve(EngineArgs(lora_path=str(tmp_path), merge=True))
    (tmp_path / "adapter_config.json").write_text("{}")
    resolved = EngineConfig.resolve(EngineArgs(lora_path=str(tmp_path), merge=True))
    assert resolved.worker_config().merged_adapter == str(tmp_path)
    assert resolved.adapter_limits(READY) is None and resolved.worker_config().lora is None
    options: dict[str, Any] = {"enable_lora": True, "quantization": "bitsandbytes", "max_loras": 2}
    first = first_adapter(EngineArgs(qlora_adapter_name_or_path=str(tmp_path), **options))
    assert first is not None and (first.name, first.path) == (str(tmp_path), str(tmp_path))
    limits = EngineConfig(EngineArgs(**options), MODEL, {}, None).adapter_limits(READY)
    assert limits is not None and (limits.max_active, limits.max_resident) == (2, 256)


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
