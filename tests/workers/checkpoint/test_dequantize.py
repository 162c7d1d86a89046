"""`quantization="dequantize"`: a quantised checkpoint computes as the dense model of its numbers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pagewire.ipc.wire.params import SamplingParams
from pagewire.workers.checkpoint.formats.quantised import QuantisedCheckpoint
from pagewire.workers.checkpoint.formats.registry import format_of
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.figures import footprint
from tests.workers.architectures import VOCAB_SIZE, Architecture
from tests.workers.checkpoint.formats.checkpoints import RECIPES, write_quantised
from tests.workers.checkpoint.formats.test_checkpoints import SMALL
from tests.workers.checkpoint.test_gguf import MODELS, mixed, roundtrip
from tests.workers.driver import Driver, load_runner
from tests.workers.gguf_files import write_gguf
from tests.workers.parity import make_prompts

PARAMS = SamplingParams(temperature=0.0, logprobs=20)
NUM_TOKENS = 12


def write_both(name: str, tmp_path: Path) -> tuple[Path, Path]:
    """A GGUF file of quantised matrices, and a folder with the numbers that ggml's own functions read from it."""
    arch, model, _ = MODELS[name]
    model = Architecture(model.name, model.fields | {"intermediate_size": 96})
    folder = model.write(tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "model.gguf", folder, model.config(), arch, kind=mixed)
    weights = load_file(folder / "model.safetensors")
    numbers = {
        key: torch.from_numpy(np.array(roundtrip(key, value.numpy(), model.config(), name))).float()
        for key, value in weights.items()
        if value.dim() > 1
    }
    save_file(weights | numbers, folder / "model.safetensors", metadata={"format": "pt"})
    return path, folder


def outputs(path: Path, **fields: Any) -> list[tuple[list[int], list[Any]]]:
    """The tokens of some prompts, and the log probabilities of 20 tokens at each place."""
    runner, _ = load_runner(path, **fields)
    requests = Driver(runner).run(make_prompts(VOCAB_SIZE, (23, 5)), NUM_TOKENS, PARAMS)
    return [(request.output, request.logprobs) for request in requests]


def differences(found: list[tuple[list[int], list[Any]]], folder: Path) -> list[float]:
    """How far log probabilities are from those of transformers with the same tokens in float32."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    off = []
    for prompt, (tokens, logprobs) in zip(make_prompts(VOCAB_SIZE, (23, 5)), found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        for row, (ids, values, _) in zip(logits.log_softmax(-1), logprobs, strict=True):
            off += [abs(row[token].item() - value) for token, value in zip(ids, values, strict=True)]
    return off


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_computes_as_the_dense_model_of_its_numbers(
    name: str, dtype: str, tmp_path: Path
) -> None:
    path, folder = write_both(name, tmp_path)
    found = outputs(path, dtype=dtype, quantization="dequantize")
    assert found == outputs(folder, dtype=dtype)  # to the bits
    if dtype == "float32":
        assert max(differences(found, folder)) < 1e-4
        rounded = differences(outputs(path, dtype=dtype), folder)
        assert sum(rounded) / len(rounded) > 1e-3  # what the option is for


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_takes_the_memory_of_the_dense_model(dtype: str, tmp_path: Path) -> None:
    path, folder = write_both("llama", tmp_path)
    dense = footprint(read_headers(folder), "avx2", dtype)
    found = footprint(read_headers(path), "avx2", dtype, "dequantize")
    assert [(part.part, part.held) for part in found.parts] == [
        (part.part, part.held) for part in dense.parts
    ]
    assert [part.read_bytes for part in found.parts] == [part.read_bytes for part in dense.parts]
    packed = footprint(read_headers(path), "avx2", dtype)
    assert sum(part.packed_bytes for part in found.parts) > sum(part.packed_bytes for part in packed.parts)


def test_plain_numbers_need_no_such_option(tmp_path: Path) -> None:
    folder = MODELS["llama"][1].write(tmp_path)
    with pytest.raises(LoadError, match="'dequantize', but the checkpoint is not quantised; leave it out"):
        load_runner(folder, quantization="dequantize")


@pytest.mark.parametrize("recipe", ["awq", "gptq-act-order", "nvfp4", "w8a8"])
def test_other_formats_compute_as_the_dense_model_of_their_numbers(recipe: str, tmp_path: Path) -> None:
    folder = Architecture("llama", SMALL).write(tmp_path / "dense")
    written = write_quantised(folder, tmp_path / "quantised", RECIPES[recipe](64)).folder
    form = format_of(json.loads((written / "config.json").read_text())["quantization_config"])
    checkpoint = QuantisedCheckpoint(Checkpoint(written), form)
    numbers = {name: checkpoint.read(name).contiguous() for name in checkpoint.names}
    save_file(numbers, folder / "model.safetensors", metadata={"format": "pt"})
    assert outputs(written, dtype="float32", quantization="dequantize") == outputs(folder, dtype="float32")
