"""Starts from packed weights: the same model to the bit, without transformers; or none at all."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from pagewire.ipc.wire.lora import LoadAdapter, LoRAConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cpu import library
from pagewire.workers.process import calls
from pagewire.workers.process.wiring import open_runner
from pagewire.workers.ranks.single import SingleRank
from pagewire.workers.run.runner import Runner
from pagewire.workers.weight_cache import ahead as ahead_module
from pagewire.workers.weight_cache import cached_loading, file, folder
from pagewire.workers.weight_cache.ahead import WeightsAhead
from pagewire.workers.weight_cache.cached_loading import keep_in_background
from pagewire.workers.weight_cache.folder import weight_folder
from pagewire.workers.weight_cache.key import key_of
from tests.workers import pooled
from tests.workers.architectures import EXPERTS, GROUPED, SERVED, Architecture
from tests.workers.driver import Driver
from tests.workers.random_adapters import CONFIG, load, make_tensors, write

OTHERS = ("apertus", "bloom", "gpt_neox", "minimax_m3_vl_text", "ministral3", "nanochat", "opt")
PROMPTS = [[5, 9, 77, 3], [8] * 11]
QWEN = Architecture("qwen3", GROUPED)  # its heads have norms


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Packed weights are those of compiled kernels."""
    if library.choose() is None:
        pytest.skip("there are no compiled kernels here")


@pytest.fixture
def model(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a model, in a cache of its own."""
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")
    return Path(shutil.copytree(llama, tmp_path / "model"))


def start(model: Path, **fields: Any) -> tuple[Runner, WeightsAhead]:
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "num_blocks": 64, "block_size": 4}
    config = WorkerConfig(str(model), num_threads=1, weight_cache=True, **(sizes | fields))
    ahead = WeightsAhead(config)
    return open_runner(config, lambda *_: None, ahead)[0], ahead


def keep(runner: Runner, ahead: WeightsAhead) -> list[Path]:
    """The files of the cache after the model of a runner was kept, or was not."""
    if (thread := keep_in_background(runner.model, ahead, runner.collective)) is not None:
        thread.join()
    return sorted(weight_folder().iterdir()) if weight_folder().exists() else []


def outputs(runner: Runner) -> Any:
    """Tokens and all log probabilities, in float32 to the bit."""
    params = SamplingParams(temperature=0.7, logprobs=5, prompt_logprobs=3)
    requests = Driver(runner).run(PROMPTS, 8, params)
    prompts = [[rows.logprobs.tolist() for rows in request.prompt_logprobs] for request in requests]
    return [(request.output, request.logprobs) for request in requests], prompts


@pytest.mark.parametrize("has_experts", [False, True])
def test_adapters_of_a_model_from_packed_weights(model: Path, tmp_path: Path, has_experts: bool) -> None:
    adapter = write(tmp_path / "adapter")
    if has_experts:
        model = Architecture("qwen3_moe", GROUPED | EXPERTS).write(tmp_path / "mixture")
        shapes = {f"model.layers.0.mlp.experts.{expert}.down_proj": (64, 36) for expert in range(4)}
        shapes["model.layers.1.mlp.gate"] = 4, 64
        write(adapter, CONFIG | {"target_modules": list(shapes)}, make_tensors(0, shapes))
    found = []
    for _ in range(2):
        awake = threading.Event()
        sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "num_blocks": 64, "block_size": 4}
        config = WorkerConfig(str(model), num_threads=1, weight_cache=True, lora=LoRAConfig(), **sizes)
        ahead = WeightsAhead(config)
        runner = open_runner(config, lambda *_: None, ahead, wake=awake.set)[0]
        assert len(keep(runner, ahead)) == 1
        assert load(runner.adapters, LoadAdapter(1, str(adapter)), awake).error is None
        found.append((ahead.packed is not None, Driver(runner).generate(PROMPTS, 8, adapters=[1, 0])))
    (first, made), (second, again) = found
    assert (first, second) == (False, True) and made == again


@pytest.mark.parametrize(
    ("name", "dtype"), [("deepseek_v3", "bfloat16"), ("phimoe", "float32"), ("llama4_text", "bfloat16")]
)
def test_routers_from_packed_weights(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of float32 with a bias and groups, with a margin, and whose weights are of what experts take."""
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2} if name == "deepseek_v3" else {}
    written = Architecture(name, SERVED[name].fields | groups).write(tmp_path / "mixture")
    runner, ahead = start(written, dtype=dtype)
    assert len(keep(runner, ahead)) == 1
    again, ahead = start(written, dtype=dtype)
    assert ahead.packed is not None and outputs(again) == outputs(runner)


def test_the_system_reads_a_checkpoint_that_leaves_half_of_the_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, read = model / "model.safetensors", list[str]()
    monkeypatch.setattr(
        os, "posix_fadvise", lambda opened, *_: read.append(str(Path(f"/proc/self/fd/{opened}").readlink()))
    )
    for available, expected in ((1, []), (0, [str(weights.resolve())])):
        memory = 2 * weights.stat().st_size - available
        monkeypatch.setattr(ahead_module, "machine_memory", lambda _, memory=memory: (1 << 40, memory))
        ahead_module.read_ahead(WorkerConfig(str(model)))
        assert read == expected
    ahead_module.read_ahead(WorkerConfig(str(model / "missing")))
    assert len(read) == 1


def test_only_a_first_start_lets_the_system_read_the_checkpoint(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: queue.SimpleQueue[WorkerConfig] = queue.SimpleQueue()
    monkeypatch.setattr(ahead_module, "read_ahead", asked.put)
    keep(*start(model))
    assert asked.get(timeout=60).model_path == str(model)
    _, ahead = start(model)
    assert ahead.packed is not None and asked.empty()


def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every import of transformers fail."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int4")],
)
def test_the_second_start_has_the_bits_of_the_first(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, quantization: str | None
) -> None:
    first, ahead = start(model, dtype=dtype, quantization=quantization)
    assert len(keep(first, ahead)) == 1
    without_transformers(monkeypatch)
    second, ahead = start(model, dtype=dtype, quantization=quantization)
    assert ahead.packed is not None and outputs(second) == outputs(first)
    for name in (
        "architecture",
        "dtype",
        "vocab_size",
        "max_model_len",
        "short_length",
        "eos_token_id",
        "kv_shapes",
        "kv_scales",
        "weight_bytes",
    ):
        assert getattr(second.model, name) == getattr(first.model, name)
    assert keep_in_background(second.model, ahead, second.collective) is None
    calls.sleep(second)
    calls.wake_up(second, None)
    assert outputs(second) == outputs(first)


def test_a_sleep_waits_until_the_weights_are_written_that_its_wake_reads(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, ahead = start(model)
    before = outputs(first)
    begun, goes_on = threading.Event(), threading.Event()
    write_file = file.write

    def held(*args: Any) -> None:
        begun.set()
        assert goes_on.wait(60)
        write_file(*args)

    monkeypatch.setattr(file, "write", held)
    first.weights.writer = keep_in_background(first.model, ahead, first.collective)
    assert begun.wait(60)
    sleeper = threading.Thread(target=calls.sleep, args=(first,))
    sleeper.start()
    goes_on.set()
    sleeper.join()
    assert first.weight_bytes == 0 and len(list(weight_folder().glob("*.weights"))) == 1
    without_transformers(monkeypatch)
    calls.wake_up(first, None)
    assert outputs(first) == before


def test_heads_with_norms_and_tied_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")
    tied = Architecture("qwen3", QWEN.fields | {"tie_word_embeddings": True})
    model = tied.write(tmp_path / "model")
    first, ahead = start(model)
    keep(first, ahead)
    without_transformers(monkeypatch)
    assert outputs(start(model)[0]) == outputs(first)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_experts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None) -> None:
    """With a router in every layer, and an expert that all tokens share."""
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")
    sizes = EXPERTS | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
    model = Architecture("qwen2_moe", GROUPED | sizes | {"decoder_sparse_step": 1}).write(tmp_path / "model")
    first, ahead = start(model, quantization=quantization)
    assert len(keep(first, ahead)) == 1
    without_transformers(monkeypatch)
    second, _ = start(model, quantization=quantization)
    assert second.model.weight_bytes == first.model.weight_bytes
    assert outputs(second) == outputs(first)


@pytest.mark.parametrize("name", ["deepseek_v2", "glm_moe_dsa", "youtu"])
def test_latents_are_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the matrices of each head, and with indexers."""
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")
    model = SERVED[name].write(tmp_path / "model")
    first, ahead = start(model)
    assert len(keep(first, ahead)) == 1
    without_transformers(monkeypatch)
    second, ahead = start(model)
    assert ahead.packed is not None and second.model.weight_bytes == first.model.weight_bytes
    assert second.model.kv_shapes == first.model.kv_shapes and outputs(second) == outputs(first)


def test_a_damaged_file_is_removed_and_written_again(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, ahead = start(model)
    (path,) = keep(first, ahead)
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    second, ahead = start(model)
    assert ahead.packed is None and not path.exists() and "does not fit its checksums" in caplog.text
    assert outputs(second) == outputs(first)
    assert keep(second, ahead) == [path] and path.read_bytes() == whole


@pytest.mark.parametrize(
    "description",
    [7, None, {"tensor": 99}, {"Unknown": {}}, {"list": []}, {"Norm": {"weight": 1}}, {"dtype": "load"}, {}],
)
def test_a_file_that_describes_no_model_is_removed(
    model: Path, caplog: pytest.LogCaptureFixture, description: Any
) -> None:
    ahead = WeightsAhead(WorkerConfig(str(model), weight_cache=True))
    ahead.wait()
    assert ahead.key is not None
    with folder.new_file(ahead.key, 0) as to:
        assert to is not None
        file.write(to, ahead.key, [], description)
    ahead = WeightsAhead(ahead.config)
    ahead.wait()
    assert ahead.packed is not None
    assert cached_loading.from_packed(ahead.packed, SingleRank(), Parallel()) is None
    assert list(weight_folder().iterdir()) == [] and "ignored the packed weights" in caplog.text


def test_nothing_is_kept_of_a_checkpoint_that_changed_meanwhile(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner, ahead = start(model)
    (model / "config.json").touch()
    assert keep(runner, ahead) == [] and "the checkpoint has changed" in caplog.text


def test_a_full_disk_is_a_line_in_the_log(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int, name: str) -> BinaryIO:
        (weight_folder() / name).touch()
        return Path("/dev/full").open("wb")

    runner, ahead = start(model)
    monkeypatch.setattr(folder, "_locked_file", full)
    assert keep(runner, ahead) == []
    assert "packed weights are not kept: [Errno 28] No space left on device" in caplog.text
    assert len(outputs(runner)) == 2


def test_other_models_start_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")
    caplog.set_level(logging.DEBUG, "pagewire.worker")
    runner, ahead = start(Architecture("diffllama", GROUPED).write(tmp_path / "model"))
    assert keep(runner, ahead) == [] and "a ModuleBase has no form" in caplog.text


@pytest.mark.parametrize("name", OTHERS)
def test_other_decoders_are_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their limits, positions, norms of embeddings, curves, slopes, and tables that scale queries."""
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")
    model = SERVED[name].write(tmp_path / "model")
    first, ahead = start(model)
    expected = outputs(first)
    assert len(keep(first, ahead)) == 1
    again, ahead = start(model)
    assert ahead.packed is not None and outputs(again) == expected


POOLED = {  # the heads of a checkpoint, and the task that they are for
    "bert": ("AutoModel", "embed"),
    "nomic_bert": ("AutoModel", "token_embed"),
    "modernbert": ("AutoModel", "embed"),
    "mpnet": ("AutoModelForTokenClassification", "token_classify"),
    "roberta": ("AutoModelForSequenceClassification", "classify"),
    "qwen3": ("AutoModelForSequenceClassification", "classify"),
}


@pytest.mark.parametrize("model_type", POOLED)
def test_models_that_pool_are_kept(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders with their embeddings, causal models, and the heads of classifiers."""
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")
    head, task = POOLED[model_type]
    model = pooled.write(tmp_path / "model", model_type, head)
    params = PoolingParams(task=task, all_tokens=True)
    first, ahead = start(model, runner="pooling")
    assert len(keep(first, ahead)) == 1
    expected = pooled.pool(first, PROMPTS, params)
    without_transformers(monkeypatch)
    second, ahead = start(model, runner="pooling")
    assert ahead.packed is not None and second.ready().pooling == first.ready().pooling
    assert all(map(torch.equal, pooled.pool(second, PROMPTS, params), expected))
    assert second.model.weight_bytes == first.model.weight_bytes


def test_another_pooling_makes_another_key(tmp_path: Path) -> None:
    model = pooled.write(tmp_path / "model", "bert")
    pooled.sentence_transformer(model, "mean_tokens")
    config = WorkerConfig(str(model), weight_cache=True)
    before = key_of(config)
    (model / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    assert before is not None and key_of(config) not in (None, before)
