"""Quantised models on a GPU, an emulated one: their weights stay packed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from pagewire.ipc.wire.params import SamplingParams
from pagewire.kernels.cuda import quantised_linear
from pagewire.kernels.cuda.linear import PackedWeightLinear
from pagewire.kernels.data.weight import Weight
from pagewire.workers.process import wiring
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice, emulated
from tests.workers.architectures import VOCAB_SIZE, Architecture
from tests.workers.checkpoint.formats.checkpoints import QUANTISED, RECIPES, write_quantised
from tests.workers.device.conftest import HEADS, SIZES
from tests.workers.driver import Driver, load_runner, values
from tests.workers.parity import make_prompts

PARAMS = SamplingParams(temperature=0.0, prompt_logprobs=0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedCudaDevice]:
    """The device of runners that are loaded."""
    launcher = EmulatedLauncher()
    own = EmulatedCudaDevice(launcher)
    monkeypatch.setattr(wiring, "open_device", lambda load: own)
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
    assert ("e4m3/row with rounded rows" in names) == (quantization == "fp8")
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


def write_fp8(source: Path, folder: Path, block: int | None) -> Path:
    """A checkpoint in 8-bit floats, with a scale for each row, or for blocks; activations are quantised, too."""
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(QUANTISED)]:
        rows, columns = tensors[name].shape
        height, width = (block, block) if block else (1, columns)
        whole = functional.pad(tensors[name].float(), (0, -columns % width, 0, -rows % height))
        blocks = whole.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        scales = blocks.abs().amax((1, 3)) / 448
        values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
        tensors[name] = values[:rows, :columns].contiguous().to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantised | ({"weight_block_size": [block, block]} if block else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["w8a8", "fp8", "fp8 in blocks", "--quantization fp8"])
def test_rows_are_rounded_where_the_checkpoint_rounds_activations(
    llama: Path, tmp_path: Path, device: EmulatedCudaDevice, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Log probabilities are near those of rows in 16 bits, and weights take the same memory."""
    monkeypatch.setattr(device, "launcher", launcher := EmulatedLauncher(capability=(8, 9)))
    monkeypatch.setattr(device.kernels, "launcher", launcher)
    sizes = HEADS | {"hidden_size": 128, "intermediate_size": 192}
    architecture, options = Architecture("llama", sizes), SIZES
    folder = architecture.write(tmp_path / "dense", dtype="bfloat16", bites=False)
    if kind == "w8a8":
        folder = write_quantised(folder, tmp_path / kind, RECIPES[kind](64)).folder
    elif kind.startswith("fp8"):
        folder = write_fp8(folder, tmp_path / kind, 128 if "blocks" in kind else None)
    else:
        folder, options = llama, SIZES | {"quantization": "fp8"}
    rounded: list[str] = []
    quantise = quantised_linear.quantise_rows
    monkeypatch.setattr(quantised_linear, "quantise_rows", lambda *of: rounded.append(of[2]) or quantise(*of))
    narrow, _ = load_runner(folder, **options)
    found = prompt_logprobs(narrow)
    assert set(rounded) == {quantised_linear.INTEGERS if kind == "w8a8" else quantised_linear.FLOATS}
    num_rounded = len(rounded)
    device.kernels.preferred -= {quantised_linear.INTEGERS, quantised_linear.FLOATS}
    wide, _ = load_runner(folder, **options)
    expected = prompt_logprobs(wide)
    assert len(rounded) == num_rounded and narrow.weight_bytes == wide.weight_bytes
    assert 0 < np.abs(found - expected).mean() < 0.2


def test_experts_of_such_checkpoints_keep_rows_in_16_bits(tmp_path: Path, device: EmulatedCudaDevice) -> None:
    """So that those of a layer stay one call."""
    sizes = HEADS | {"num_local_experts": 4}
    folder = Architecture("mixtral", sizes).write(tmp_path, dtype="bfloat16")
    runner, _ = load_runner(folder, **SIZES, quantization="fp8")
    assert device.num_recorded > 0 and np.isfinite(prompt_logprobs(runner)).all()


def test_dense_models_have_no_packed_products(
    llama: Path, device: EmulatedCudaDevice, packed: list[Weight]
) -> None:
    load_runner(llama, **SIZES)
    assert packed == []
