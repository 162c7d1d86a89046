"""A model whose code is in its repository: it runs where it is trusted, and nowhere else."""

from __future__ import annotations

import json
import logging
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
OWN_ATTENTION = """
import pathlib

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path(__file__).with_name("was_run").touch()


class SquaredConfig(LlamaConfig):
    model_type = "squared"


class Mean(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q_proj = nn.Linear(size, size, bias=False)

    def forward(self, hidden_states, **_):
        ones = torch.arange(1, hidden_states.shape[1] + 1)[:, None]
        return self.q_proj(hidden_states.cumsum(1) / ones), None


class SquaredForCausalLM(LlamaForCausalLM):
    config_class = SquaredConfig
    _keys_to_ignore_on_load_unexpected = [".*_proj"]

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = Mean(config.hidden_size)
"""
NUM_TOKENS = 8


def add_code(folder: Path, code: str, **settings: object) -> Path:
    """The folder, with code of its own in its repository, and these settings in its config.json."""
    (folder / "modeling_squared.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "SquaredConfig", "AutoModelForCausalLM": "SquaredForCausalLM"}
    auto_map = {auto: f"modeling_squared.{name}" for auto, name in classes.items()}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map} | settings))
    return folder


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama. The copies that transformers makes of a folder's code do not outlive the test."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return Architecture("llama", GROUPED).write(tmp_path / "squared")


SQUARED = {"model_type": "squared", "architectures": ["SquaredForCausalLM"]}


@pytest.fixture
def folder(plain: Path) -> Path:
    """A checkpoint of a model that only its code serves."""
    return add_code(plain, CODE, **SQUARED)


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


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("code", [CODE, OWN_ATTENTION])
def test_a_model_that_is_served_here_runs_without_its_code(
    plain: Path, tmp_path: Path, code: str, trust: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = make_prompts(VOCAB_SIZE, (23, 5))
    expected = our_tokens(plain, prompts, NUM_TOKENS)
    caplog.clear()
    caplog.set_level(logging.INFO, "pagewire.worker")
    runner, ready = load_runner(add_code(plain, code), trust_remote_code=trust)
    assert ready.architecture == "LlamaForCausalLM"
    assert Driver(runner).generate(prompts, NUM_TOKENS) == expected
    assert not list(tmp_path.rglob("was_run"))
    [line] = [record.getMessage() for record in caplog.records if "repository" in record.getMessage()]
    assert line.startswith("the model runs as llama does here, without the code of its repository")


def test_a_class_of_another_name_is_the_repositorys(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever type of model its config.json says that it is."""
    caplog.set_level(logging.INFO, "pagewire.worker")
    folder = add_code(plain, CODE, architectures=["SquaredForCausalLM"])
    assert load_runner(folder, trust_remote_code=True)[1].architecture == "SquaredForCausalLM"
    [line] = [
        record.getMessage() for record in caplog.records if "(trust_remote_code)" in record.getMessage()
    ]
    assert line.startswith("the model runs the code of its repository")


def test_what_nothing_serves_is_refused_with_what_would_help(plain: Path) -> None:
    folder = add_code(plain, OWN_ATTENTION, **SQUARED)
    with pytest.raises(LoadError, match=r"does not let its attention be replaced.*docs/own_models\.md"):
        load_runner(folder, trust_remote_code=True)
