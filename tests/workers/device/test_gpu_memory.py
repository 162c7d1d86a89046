"""How the memory of a GPU is shared out: by an emulated device whose sizes are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cuda.attention import Workspace
from pagewire.kernels.cuda.sampling import MAX_VOCAB_SIZE, Sampler
from pagewire.workers.device.gpu_memory import (
    CONTEXT_BYTES,
    GRAPH_BYTES,
    MOST_LIKELY,
    RECORDED_TOKENS,
    GpuMemory,
    attention_scratch,
    max_samples,
    sampling_scratch,
)
from pagewire.workers.errors import LoadError
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.peak import TensorPeak
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice
from tests.workers.architectures import VOCAB_SIZE, Architecture
from tests.workers.driver import load_runner

GIB = 1 << 30
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96}
TIED = {"tie_word_embeddings": True}
SIZES: dict[str, Any] = {"device": "cuda", "block_size": 16, "max_num_seqs": 6, "num_blocks": None}
BLOCK_BYTES = 2 * 2 * 16 * 32 * 2  # of 2 layers: keys and values of 16 tokens in bfloat16


def plan_of(runner: Runner) -> GpuMemory:
    assert runner.device.plan is not None
    return runner.device.plan


def occupy(device: EmulatedCudaDevice, num_bytes: int) -> None:
    """Other processes hold so much, and did when the device was opened."""
    device.other_bytes = num_bytes
    device._beside_torch = device._used_beside_torch()


def shared_out(config: WorkerConfig | None = None, **fields: Any) -> GpuMemory:
    """The plan of a GPU of 80 GiB."""
    parts = dict.fromkeys(("context", "weights", "tables", "scratch", "activations", "others"), 0)
    given: dict[str, Any] = {"total": 80 * GIB, **parts, "records": True}
    return GpuMemory.shared_out(config or WorkerConfig(""), **given | fields)


@pytest.mark.parametrize("multiprocessors", [4, 132])
def test_scratch_is_what_the_kernels_allocate(multiprocessors: int) -> None:
    workspace = Workspace.allocate(multiprocessors, "cpu")
    tensors = (workspace.outputs, workspace.sums, workspace.arrivals)
    assert attention_scratch(multiprocessors) == sum(x.nbytes for x in tensors)
    for rows, vocab_size in ((1, 100), (7, 50_000)):
        with TensorPeak() as peak:
            sampler = Sampler(EmulatedLauncher(), rows, vocab_size, MOST_LIKELY, "cpu")
        assert sampler.max_rows == rows and peak.most == sampling_scratch(rows, vocab_size)
    assert sampling_scratch(1, MAX_VOCAB_SIZE) > 0 == sampling_scratch(1, MAX_VOCAB_SIZE + 1)


def test_a_peak_counts_what_lives_at_a_time_and_each_memory_once() -> None:
    given = torch.zeros(1000)
    with TensorPeak() as peak:
        given.view(10, 100).add_(1)
        first = torch.ones(256)
        del first
        second = torch.ones(128)
        third = second.view(2, 64) + 1
    assert peak.most == 4 * 256 == third.nbytes + second.nbytes


def test_the_cache_gets_what_no_part_takes() -> None:
    parts = {"context": GIB, "weights": 20 * GIB, "tables": GIB, "scratch": GIB, "activations": 2 * GIB}
    plan = shared_out(WorkerConfig("", max_num_batched_tokens=4 * RECORDED_TOKENS), **parts)
    assert (plan.reserve, plan.graphs) == (
        8 * GIB,
        GRAPH_BYTES + GIB // 2,
    )  # of a step of a fourth of the tokens
    assert plan.kv_cache == (80 - 8 - 25) * GIB - plan.graphs
    assert sum(plan.parts.values()) == plan.total and plan.missing == 0
    assert str(plan) == (
        "reserve 8.00, context 1.00, weights 20.00, tables 1.00, scratch 1.00, activations 2.00, graphs 0.75, "
        "kv cache 46.25 of 80.00 GiB"
    )


def test_other_processes_may_have_the_reserve() -> None:
    none, few, many = (shared_out(others=n * GIB) for n in (0, 8, 30))
    assert none.kv_cache == few.kv_cache == many.kv_cache + 22 * GIB


def test_options_change_their_parts() -> None:
    recorded, adapters = shared_out(), shared_out(WorkerConfig("", lora=LoRAConfig()))
    assert (adapters.graphs, recorded.graphs) == (2 * GRAPH_BYTES, GRAPH_BYTES)
    assert shared_out(records=False).graphs == 0
    assert shared_out(WorkerConfig("", gpu_memory_utilization=0.5)).reserve == 40 * GIB
    fixed = shared_out(WorkerConfig("", kv_cache_memory_bytes=79 * GIB))
    assert (fixed.kv_cache, fixed.missing) == (79 * GIB, 7 * GIB + GRAPH_BYTES)


def test_the_plan_of_a_worker(
    llama: Path, device: EmulatedCudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """Each part that is known, to the byte."""
    device.torch_bytes = 10 << 20
    with caplog.at_level("INFO", "pagewire.worker"):
        runner, ready = load_runner(llama, **SIZES)
    plan, rows = plan_of(runner), max_samples(runner.config)
    hidden, inner, layer_norms = 64, 96, 2 * 64
    layer = hidden * (64 + 2 * 32 + 64 + 3 * inner) + layer_norms
    assert plan.weights == ready.weight_bytes == 2 * (2 * layer + 2 * VOCAB_SIZE * hidden + hidden)
    assert plan.scratch == attention_scratch(4) + sampling_scratch(rows, VOCAB_SIZE)
    assert plan.tables == device.torch_bytes - plan.weights - plan.scratch
    assert (plan.context, plan.others) == (CONTEXT_BYTES, 0)
    assert plan.graphs == GRAPH_BYTES + of_longest_recorded(runner)
    assert (plan.total, plan.reserve) == (4 * GIB, 4 * GIB - int(0.9 * 4 * GIB))
    logits = 6 * VOCAB_SIZE * 2  # of each sequence, in bfloat16
    up = 6 * 64 * 2 * inner * 2  # of all tokens of the largest step: 6 sequences of 64
    assert logits + up < plan.activations < 5 * up
    assert plan.kv_cache == plan.total - sum(plan.parts.values()) + plan.kv_cache
    assert f"memory of cuda:0: {plan}" in caplog.text
    memory = call_memory(runner)
    assert memory == ready.memory
    kept = ("reserve", "others", "context", "tables", "scratch", "activations", "total")
    assert {name: memory[name] for name in kept} == {name: getattr(plan, name) for name in kept}
    assert memory["graphs"] == 0 and memory["weights"] == plan.weights  # the emulation records none
    assert "memory: context 0.50, weights 0.00" in caplog.text


def of_longest_recorded(runner: Runner) -> int:
    """Of the activations of the widest step, the share of the longest that is recorded."""
    widest = runner.config.max_num_batched_tokens
    return plan_of(runner).activations * min(RECORDED_TOKENS, widest) // widest


def call_memory(runner: Runner) -> dict[str, int]:
    from pagewire.workers.process.calls import call

    result: dict[str, int] = call(runner, "memory", [], {})
    return result


@pytest.mark.parametrize(
    ("fields", "graphs"),
    [
        ({}, GRAPH_BYTES),
        ({"enforce_eager": True}, 0),
        ({"dtype": "float32"}, 0),
        ({"lora": LoRAConfig()}, 2 * GRAPH_BYTES),
    ],
)
def test_graphs_take_memory_where_steps_are_recorded(
    llama: Path, device: EmulatedCudaDevice, fields: dict[str, Any], graphs: int
) -> None:
    runner, _ = load_runner(llama, **SIZES, **fields)
    expected = graphs + of_longest_recorded(runner) if graphs else 0
    assert plan_of(runner).graphs == expected and (runner.graphs is not None) == bool(graphs)


def test_a_tied_output_layer_takes_no_memory_of_its_own(tmp_path: Path, device: EmulatedCudaDevice) -> None:
    """One that is quantised while it is loaded does, and the embedding stays dense."""
    embedding = VOCAB_SIZE * 64 * 2
    apart, tied = (
        Architecture("qwen2", HEADS | {"num_hidden_layers": 3} | fields).write(
            tmp_path / name, dtype="bfloat16"
        )
        for name, fields in (("apart", {}), ("tied", TIED))
    )
    sizes = [load_runner(folder, **SIZES)[0].weight_bytes for folder in (apart, tied)]
    assert sizes[0] - sizes[1] == embedding
    sizes = [load_runner(folder, **SIZES, quantization="int8")[0].weight_bytes for folder in (apart, tied)]
    assert sizes[0] == sizes[1]


def test_a_cache_that_is_too_small_names_what_takes_the_memory(
    llama: Path, device: EmulatedCudaDevice
) -> None:
    """By size, with the options that change each part."""
    device.total_bytes = 2 * GIB
    occupy(device, GIB)
    text = (
        r"a request of max_model_len 64 needs 4 KV blocks .*only 3 fit; max_model_len 48 would fit.*Of the "
        r"2\.00 GiB of cuda:0, 0\.00 are for the KV cache; .*: others 1\.00, context 0\.50, "
        r"graphs 0\.25 \(enforce_eager\), reserve 0\.20 \(gpu_memory_utilization\), scratch 0\.00 "
        r"\(max_num_seqs\), activations 0\.00 \(max_num_batched_tokens, max_num_seqs\), weights 0\.00"
    )
    with pytest.raises(LoadError, match=text) as refusal:
        load_runner(llama, **SIZES, kv_cache_memory_bytes=3 * BLOCK_BYTES)
    assert len(str(refusal.value)) < 700
    runner, _ = load_runner(llama, **SIZES, kv_cache_memory_bytes=4 * BLOCK_BYTES)
    assert runner.num_blocks == 4


def test_other_processes_are_told_of(
    llama: Path, device: EmulatedCudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    runner, _ = load_runner(llama, **SIZES)
    assert "other processes" not in caplog.text
    alone = plan_of(runner).kv_cache
    occupy(device, GIB)
    runner, _ = load_runner(llama, **SIZES)
    plan = plan_of(runner)
    assert plan.others == GIB and plan.kv_cache == alone - GIB + plan.reserve
    assert "other processes hold 1.0 GiB, more than gpu_memory_utilization leaves" in caplog.text


def test_a_step_that_finds_no_memory_names_the_parts(
    llama: Path, device: EmulatedCudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(step: Callable[[], object]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device, "_activations_of", refuse)
    text = r"steps of 2048 tokens \(max_num_batched_tokens\) do not fit.*weights 0\.00 \(quantization"
    with pytest.raises(LoadError, match=text):
        load_runner(llama, **SIZES)


def test_what_libraries_take_counts_with_the_context(llama: Path, device: EmulatedCudaDevice) -> None:
    """It came after the device was opened, and outside of torch."""
    device.other_bytes = 1 << 20
    assert plan_of(load_runner(llama, **SIZES)[0]).context == CONTEXT_BYTES + (1 << 20)
