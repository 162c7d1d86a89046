"""Whole checkpoints: each recipe's files hold, for their readers, the matrices that were rounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagewire.workers.model.checkpoint import Checkpoint
from pagewire.workers.model.formats.registry import format_of

from ..architectures import GROUPED, Architecture
from .checkpoints import RECIPES, write_quantised
from .reading import assert_exact, assert_near, read

SMALL = GROUPED | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama whose rows are long enough for groups of 128."""
    return Architecture("llama", SMALL).write(tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_is_read_as_it_was_written(name: str, dense: Path, tmp_path: Path) -> None:
    recipe = RECIPES[name](64)
    written = write_quantised(dense, tmp_path, recipe, keep=True)
    form = format_of(json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    checkpoint, names = Checkpoint(tmp_path), set(Checkpoint(dense).names)
    form.check(checkpoint.names)
    assert set(written.matrices) == {name.removesuffix(".weight") for name in names if "proj" in name}
    for module, matrix in written.matrices.items():
        parts = [part for part in checkpoint.names if part.startswith(f"{module}.")]
        tensors = {part.rpartition(".")[2]: checkpoint.read(part) for part in parts}
        weight = read(form, tensors, module)
        (assert_near if recipe.reordered else assert_exact)(weight, matrix)
        original = Checkpoint(dense).read(f"{module}.weight")
        assert (weight.dense() - original).norm() / original.norm() < 1.4 / 2 ** (recipe.bits - 1)
    for other in names - {f"{module}.weight" for module in written.matrices}:
        assert torch.equal(checkpoint.read(other), Checkpoint(dense).read(other))
