"""Whole checkpoints: each recipe's files are read as the matrices that were rounded, and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagewire.workers.checkpoint.formats.quantised import QuantisedCheckpoint
from pagewire.workers.checkpoint.formats.registry import format_of
from pagewire.workers.checkpoint.source import Checkpoint
from tests.workers.architectures import GROUPED, VOCAB_SIZE, Architecture
from tests.workers.checkpoint.formats.checkpoints import RECIPES, write_quantised
from tests.workers.checkpoint.formats.reading import assert_exact, assert_near
from tests.workers.driver import Driver, load_runner
from tests.workers.parity import make_prompts

SMALL = GROUPED | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama whose rows are long enough for groups."""
    return Architecture("llama", SMALL).write(tmp_path_factory.mktemp("dense"), dtype="bfloat16")


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_is_read_as_it_was_written(name: str, dense: Path, tmp_path: Path) -> None:
    recipe = RECIPES[name](64)
    written = write_quantised(dense, tmp_path, recipe, keep=True)
    form = format_of(json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    checkpoint, original = QuantisedCheckpoint(Checkpoint(tmp_path), form), Checkpoint(dense)
    assert set(checkpoint.names) == set(original.names)
    assert {f"{module}.weight" for module in written.matrices} == {n for n in original.names if "proj" in n}
    for full in original.names:
        exact = original.read(full)
        assert checkpoint.on_meta(full).shape == exact.shape
        if (matrix := written.matrices.get(full.removesuffix(".weight"))) is None:
            assert torch.equal(checkpoint.read(full), exact)
            continue
        weight = checkpoint.weight(full, torch.float32)
        (assert_near if recipe.reordered else assert_exact)(weight, matrix)
        assert (weight.dense() - exact).norm() / exact.norm() < 1.4 / 2 ** (recipe.bits - 1)


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "nvfp4", "w8a8"])
def test_a_checkpoint_runs(name: str, dense: Path, tmp_path: Path) -> None:
    """The proof at load time holds the model against its dequantised weights."""
    write_quantised(dense, tmp_path, RECIPES[name](64))
    if name == "nvfp4":  # older versions of ModelOpt have a file of their own
        config = json.loads((tmp_path / "config.json").read_text())
        settings = {"producer": {"name": "modelopt"}, "quantization": config.pop("quantization_config")}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    runner, _ = load_runner(tmp_path)
    size = sum(Checkpoint(dense).read(name).nbytes for name in Checkpoint(dense).names)
    assert runner.model.is_stack and runner.model.weight_bytes < 0.8 * size
    prompts = make_prompts(VOCAB_SIZE)
    assert [len(tokens) for tokens in Driver(runner).generate(prompts, 4)] == [4] * len(prompts)
