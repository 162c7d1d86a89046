"""Mixtures of experts on a GPU, an emulated one: a layer's experts are one call, and steps with them are replayed.

The oracles are transformers, PEFT, and the same experts one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.ipc.wire.params import SamplingParams
from pagewire.kernels.cuda.experts import CudaExperts
from pagewire.kernels.cuda.variants import Launches, variants_of
from pagewire.workers.device.interface import KernelNeeds
from pagewire.workers.errors import LoadError
from pagewire.workers.families import structures
from pagewire.workers.network.loading import ModelSettings
from pagewire.workers.network.network import Network
from pagewire.workers.run.graphs import padding_batch
from pagewire.workers.run.interface import RecordedShape
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice
from tests.workers.architectures import EXPERTS, VOCAB_SIZE, Architecture
from tests.workers.device.conftest import HEADS, SIZES
from tests.workers.device.test_cuda import (
    PLAIN,
    Adapted,
    Core,
    check_tokens,
    make_plans,
    outcome,
)
from tests.workers.device.test_cuda_graphs import num_replayed
from tests.workers.driver import GREEDY, Driver, load_runner, values
from tests.workers.parity import make_prompts
from tests.workers.peft_adapters import peft_logprobs, write_adapter

SHARED = {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}
WIDE = EXPERTS | {"moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": WIDE | SHARED,
    "qwen3_moe": WIDE,
}


def write(folder: Path, name: str, **fields: Any) -> Path:
    """A model with experts of sizes that the kernels have, but for other fields."""
    return Architecture(name, HEADS | MODELS[name] | fields).write(folder, dtype="bfloat16", bites=False)


def load(folder: Path, **fields: Any) -> Runner:
    return load_runner(folder, **(SIZES | fields))[0]


def calls_of(runner: Runner) -> list[object]:
    """What computes the experts of each layer in one call, if anything does."""
    base = runner.model.model.base
    assert isinstance(base, Network)
    return [experts.compiled for experts in base.stack._experts if experts is not None]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(tmp_path: Path, device: EmulatedCudaDevice, name: str) -> None:
    folder = write(tmp_path, name)
    runner = load(folder)
    assert all(isinstance(call, CudaExperts) for call in calls_of(runner)) and len(calls_of(runner)) == 2
    check_tokens(folder, runner)
    assert num_replayed(runner) > 0


@pytest.mark.parametrize("quantization", [None, "int4", "int8", "fp8"])
def test_replayed_steps_give_what_experts_one_by_one_do(
    tmp_path: Path, device: EmulatedCudaDevice, quantization: str | None
) -> None:
    """To the bit, if weights are packed: so the experts' and all other sums of a row depend on the row alone."""
    folder = write(tmp_path, "qwen3_moe")
    plans = make_plans(make_prompts(VOCAB_SIZE, (9, 20, 1)), 5, [PLAIN, GREEDY, PLAIN])
    recorded = load(folder, quantization=quantization)
    eager = load(folder, quantization=quantization, enforce_eager=True)
    found = [[outcome(result) for result in Core(runner).run(plans)] for runner in (recorded, eager)]
    assert found[0] == found[1] and num_replayed(recorded) == 4
    device.kernels.replace("experts")
    plain = load(folder, quantization=quantization)
    assert calls_of(plain) == [None, None] and plain.graphs is None
    if quantization is not None:
        assert [outcome(result) for result in Core(plain).run(plans)] == found[0]


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_step_does_not_wait_for_the_device(
    tmp_path: Path, device: EmulatedCudaDevice, num_tokens: int
) -> None:
    """Neither one of a token nor a prompt; where experts run one by one, the host counts their rows."""
    folder = write(tmp_path, "qwen2_moe")

    def why_it_waits(runner: Runner) -> str | None:
        shape = RecordedShape(num_tokens, 1, num_tokens)
        batch = padding_batch(shape, 3, 16, runner.device.torch_device)
        with torch.inference_mode():
            return runner.device.why_it_waits(lambda: runner.launcher.forward(batch, None))

    assert why_it_waits(load(folder)) is None
    device.kernels.replace("experts")
    assert "aten::bincount" in str(why_it_waits(load(folder)))


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_experts_without_a_kernel_run_one_by_one(
    tmp_path: Path, device: EmulatedCudaDevice, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the width of an expert is no multiple of 32; steps are not recorded."""
    folder = write(tmp_path, name, moe_intermediate_size=48)
    with caplog.at_level("INFO", "pagewire.worker"):
        runner = load(folder)
    assert calls_of(runner) == [None, None] and runner.graphs is None and not runner.records
    assert "the model waits for the device: aten::bincount has a result" in caplog.text
    assert device.plan is not None and device.plan.graphs == 0
    check_tokens(folder, runner)


def test_a_wrong_kernel_of_experts_is_noticed(
    tmp_path: Path, device: EmulatedCudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gives the last expert's rows to the first."""
    right = CudaExperts.__call__

    def wrong(self: CudaExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return right(self, x, ids % 3, weights)

    monkeypatch.setattr(CudaExperts, "__call__", wrong)
    for quantization in (None, "int4"):
        with pytest.raises(LoadError, match="grouped product of 4 experts"):
            load(write(tmp_path, "mixtral"), quantization=quantization)


def test_experts_of_modules(
    tmp_path: Path, device: EmulatedCudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their experts are one call all the same; steps of a module are not recorded."""
    monkeypatch.setattr(structures, "OTHER_ARITHMETIC", {"afmoe"})  # so that it is no stack
    folder = Architecture("afmoe", HEADS | WIDE).write(tmp_path, dtype="bfloat16")
    plans = make_plans(make_prompts(VOCAB_SIZE, (9, 20, 1)), 5, [PLAIN, GREEDY, PLAIN])
    found = []
    for call in (CudaExperts, type(None)):
        runner = load(folder, quantization="int4")
        assert isinstance(runner.model.model.base.module.layers[1].mlp.experts.grouped.compiled, call)
        assert runner.graphs is None
        found.append([outcome(result) for result in Core(runner).run(plans)])
        device.kernels.replace("experts")
    assert found[0] == found[1]


def test_adapters_of_experts_give_what_peft_does(tmp_path: Path, device: EmulatedCudaDevice) -> None:
    """Of their router, too. Experts that may have adapters run one by one, and so steps are not recorded."""
    model = write(tmp_path / "model", "mixtral")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    kind = {"r": 4, "target_modules": ["q_proj"], "target_parameters": parameters}
    adapter = write_adapter(model, tmp_path / "adapter", 1, 0.1, **kind)
    adapted = Adapted(load_folder(model))
    assert calls_of(adapted.runner) == [None, None] and adapted.runner.graphs is None
    adapted.load(1, adapter)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    requests = Driver(adapted.runner, 32).run(make_prompts(VOCAB_SIZE, (9, 9)), 3, params, adapters=[1, 0])
    for request, folder in zip(requests, (adapter, None), strict=True):
        (rows,) = request.prompt_logprobs
        ours, theirs = torch.tensor(values(rows)[1]), peft_logprobs(model, folder, request.prompt)
        torch.testing.assert_close(ours.flatten(), torch.tensor(theirs), rtol=0, atol=0.2)
    plain = peft_logprobs(model, None, requests[0].prompt)
    changed = torch.tensor(peft_logprobs(model, adapter, requests[0].prompt)) - torch.tensor(plain)
    assert changed.abs().max() > 0.2


def load_folder(folder: Path) -> Callable[..., Runner]:
    return lambda **fields: load(folder, **fields)


@pytest.mark.parametrize("name", [*MODELS, "llama"])
def test_kernels_of_experts_are_compiled_for_mixtures_only(name: str) -> None:
    dtype = torch.bfloat16
    config = Architecture(name, HEADS | MODELS.get(name, {})).config()
    needs: KernelNeeds = ModelSettings(config, None, dtype, dtype, [], 64).kernel_needs
    assert needs.mixture == (name != "llama")
    names = {variant.source for variant in variants_of(Launches(dtype, dtype, 32, mixture=needs.mixture))}
    assert ("experts.cu" in names) == needs.mixture
