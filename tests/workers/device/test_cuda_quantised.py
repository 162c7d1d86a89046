"""Quantised models on a GPU, an emulated one: their weights stay packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire.ipc.wire.params import SamplingParams
from pagewire.kernels.cuda.linear import PackedWeightLinear
from pagewire.kernels.data.weight import Weight
from pagewire.workers.run import runner as runner_module
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice, emulated
from tests.workers.architectures import VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner, values
from tests.workers.parity import make_prompts

SIZES: dict[str, Any] = {"device": "cuda", "block_size": 16, "max_num_seqs": 6, "num_blocks": 24}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96}
PARAMS = SamplingParams(temperature=0.0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Architecture("llama", HEADS).write(tmp_path_factory.mktemp("llama"), dtype="bfloat16")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedCudaDevice]:
    """The device of runners that are loaded."""
    launcher = EmulatedLauncher()
    own = EmulatedCudaDevice(launcher)
    monkeypatch.setattr(runner_module, "open_device", lambda load: own)
    with emulated(own.kernels):
        yield own


def prompt_logprobs(runner: Runner) -> np.ndarray[Any, Any]:
    requests = Driver(runner).run(make_prompts(VOCAB_SIZE, (30, 9)), 3, PARAMS)
    return np.concatenate([values(part)[1] for request in requests for part in request.prompt_logprobs])


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Weight]:
    """The weights that were packed for kernels."""
    weights: list[Weight] = []
    init: Callable[..., None] = PackedWeightLinear.__init__

    def count(
        self: PackedWeightLinear, launcher: EmulatedLauncher, weight: Weight, *others: object, **options: Any
    ) -> None:
        init(self, launcher, weight, *others, **options)
        weights.append(weight)

    monkeypatch.setattr(PackedWeightLinear, "__init__", count)
    return weights


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_weights_stay_packed(
    llama: Path, device: EmulatedCudaDevice, packed: list[Weight], quantization: str
) -> None:
    """In less memory than dense ones, with the log probabilities of these, also where steps are replayed."""
    narrow, _ = load_runner(llama, **SIZES, quantization=quantization)
    found, num_packed = prompt_logprobs(narrow), len(packed)
    num_recorded = device.num_recorded
    names = {weight.scheme.name for weight in packed}
    assert ("e4m3/row" in names) == (quantization == "fp8")
    assert num_packed >= 2 * 4 and device.num_replayed > 0
    device.kernels.replace("pack")
    wide, _ = load_runner(llama, **SIZES, quantization=quantization)
    expected = prompt_logprobs(wide)
    assert len(packed) == num_packed and device.num_recorded == 2 * num_recorded
    assert np.abs(found - expected).max() < 0.1 and np.abs(found - expected).mean() > 0
    assert narrow.weight_bytes < (0.5 if quantization == "int4" else 0.8) * wide.weight_bytes


def test_experts_stay_packed(tmp_path: Path, device: EmulatedCudaDevice, packed: list[Weight]) -> None:
    """Those of a layer are one call over packed weights."""
    sizes = HEADS | {"num_local_experts": 4}
    folder = Architecture("mixtral", sizes).write(tmp_path, dtype="bfloat16")
    narrow, _ = load_runner(folder, **SIZES, quantization="int4")
    found = prompt_logprobs(narrow)
    assert len(packed) >= 2 * (2 + 4 * 2)  # in each layer: attention, and two products of each expert
    device.kernels.replace("pack")
    wide, _ = load_runner(folder, **SIZES, quantization="int4")
    # Rounding a weight may choose another expert for a token.
    assert 0 < np.median(np.abs(found - prompt_logprobs(wide))) < 0.05
    assert narrow.weight_bytes < 0.5 * wide.weight_bytes


def test_dense_models_have_no_packed_products(
    llama: Path, device: EmulatedCudaDevice, packed: list[Weight]
) -> None:
    load_runner(llama, **SIZES)
    assert packed == []
