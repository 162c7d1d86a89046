"""A model whose code is in its repository: it runs where it is trusted, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pagewire.workers.errors import LoadError
from tests.workers.architectures import GROUPED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.parity import greedy_tokens, make_prompts, our_tokens

CODE = """
import pathlib

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path(__file__).with_name("was_run").touch()


class SquaredConfig(LlamaConfig):
    model_type = "squared"


class Squared(nn.Module):
    def forward(self, x):
        return nn.functional.relu(x) ** 2


class SquaredForCausalLM(LlamaForCausalLM):
    config_class = SquaredConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = Squared()
"""
NUM_TOKENS = 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with its code. The copies that transformers makes of it do not outlive the test."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    made = Architecture("llama", GROUPED).write(tmp_path / "squared")
    (made / "modeling_squared.py").write_text(CODE)
    config = json.loads((made / "config.json").read_text())
    classes = {"AutoConfig": "SquaredConfig", "AutoModelForCausalLM": "SquaredForCausalLM"}
    config |= {
        "model_type": "squared",
        "architectures": ["SquaredForCausalLM"],
        "auto_map": {auto: f"modeling_squared.{name}" for auto, name in classes.items()},
    }
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_code_runs_where_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompts = make_prompts(VOCAB_SIZE, (23, 5))
    runner, ready = load_runner(folder, trust_remote_code=True)
    assert ready.architecture == "SquaredForCausalLM" and list(tmp_path.rglob("was_run"))
    found = Driver(runner).generate(prompts, NUM_TOKENS)
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    assert found == [greedy_tokens(theirs, prompt, NUM_TOKENS) for prompt in prompts]
    # The same weights without the code are another model.
    plain = Architecture("llama", GROUPED).write(tmp_path / "plain")
    for name, weight in load_file(plain / "model.safetensors").items():
        assert torch.equal(weight, load_file(folder / "model.safetensors")[name])
    assert our_tokens(plain, prompts, NUM_TOKENS) != found


def test_code_that_is_not_trusted_does_not_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="trust_remote_code"):
        load_runner(folder)
    assert not list(tmp_path.rglob("was_run"))
