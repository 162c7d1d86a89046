"""MLP speculators against a plain implementation of their arithmetic, on random checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.workers.errors import LoadError
from pagewire.workers.process.calls import call
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import VOCAB_SIZE
from tests.workers.driver import GREEDY, Driver, load_runner
from tests.workers.parity import make_prompts
from tests.workers.speculation.speculating import (
    Proposal,
    Speculated,
    SpeculativeDriver,
    open_for,
    runner_with,
)

HIDDEN = 64
SETTINGS = {
    "model_type": "mlp_speculator",
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "vocab_size": VOCAB_SIZE,
    "emb_dim": HIDDEN,
    "inner_dim": 32,
    "n_predict": 3,
    "tie_weights": False,
    "scale_input": False,
    "n_candidates": 5,
}


@pytest.fixture(scope="module")
def plain(llama: Path) -> Runner:
    """The model without a drafter."""
    return runner_with(llama, None)


def write(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A random speculator; returns its settings and weights by their names without the prefix."""
    settings = SETTINGS | changes
    size = settings["inner_dim"] or settings["emb_dim"]
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    tensors: dict[str, Tensor] = {}
    for i in range(settings["n_predict"]):
        tied = settings["tie_weights"] and i > 0
        if not (tied and i > 1):
            tensors[f"proj.{i}.weight"] = random(size, settings["emb_dim"] if i == 0 else size)
        if not tied:
            tensors[f"emb.{i}.weight"] = random(VOCAB_SIZE, size)
            tensors[f"ln.{i}.weight"], tensors[f"ln.{i}.bias"] = 1 + random(size), random(size)
            tensors[f"head.{i}.weight"] = random(VOCAB_SIZE, size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(
        {f"speculator.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return settings, tensors


def expected_drafts(
    settings: dict[str, Any], weights: dict[str, Tensor], hidden: Tensor, token_id: int
) -> list[int]:
    """The likeliest tokens after `token_id`, from the final hidden state [H] that it was sampled from."""

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + 1e-6)

    n, size = settings["n_predict"], settings["inner_dim"] or settings["emb_dim"]
    state_weight = 0.5 ** (0.5 / n)
    token_weight = math.sqrt((1 - state_weight**2) * (size / 2))
    state = norm(hidden) / math.sqrt(2) if settings["scale_input"] else hidden
    drafts = []
    for i in range(n):
        projection, layer = (min(i, 1), 0) if settings["tie_weights"] else (i, i)
        state = weights[f"proj.{projection}.weight"] @ state
        state = state + (token_weight / state_weight) * weights[f"emb.{layer}.weight"][token_id]
        state = norm(state) * weights[f"ln.{layer}.weight"] + weights[f"ln.{layer}.bias"]
        state = torch.nn.functional.gelu(state)
        token_id = int((weights[f"head.{layer}.weight"] @ state).argmax())
        drafts.append(token_id)
    return drafts


def hidden_states(folder: Path, proposals: list[Proposal]) -> list[Tensor]:
    """Transformers' final hidden state from which the last token before each proposal was sampled."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([p.before[:-1]])).last_hidden_state[0, -1] for p in proposals]


def run(llama: Path, drafter: Path, num_tokens: int = 9) -> list[Speculated]:
    driver = SpeculativeDriver(
        runner_with(llama, drafter, "mlp_speculator", 3), wanted=lambda step, slot: 3 - (step + slot) % 3
    )
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(make_prompts(VOCAB_SIZE))]
    driver.run(sequences, num_tokens)
    return sequences


@pytest.mark.parametrize(
    "changes",
    [{}, {"inner_dim": 0}, {"scale_input": True}, {"tie_weights": True, "n_predict": 4}],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_drafts_are_those_of_the_formula(llama: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    settings, weights = write(tmp_path, **changes)
    proposals = [p for s in run(llama, tmp_path) for p in s.proposals]
    assert {len(p.drafts) for p in proposals} == {1, 2, 3}
    for proposal, hidden in zip(proposals, hidden_states(llama, proposals), strict=True):
        expected = expected_drafts(settings, weights, hidden, proposal.before[-1])
        assert proposal.drafts == expected[: len(proposal.drafts)]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)], ids=["greedy", "sampled"])
def test_they_change_nothing(llama: Path, plain: Runner, tmp_path: Path, params: SamplingParams) -> None:
    write(tmp_path)
    prompts = make_prompts(VOCAB_SIZE)
    expected = Driver(plain).generate(prompts, 9, params)
    driver = SpeculativeDriver(runner_with(llama, tmp_path, "mlp_speculator", 3))
    sequences = [driver.add(i, prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    driver.run(sequences, 9)
    assert [s.output[:9] for s in sequences] == expected


def test_sleep_drops_its_weights(llama: Path, tmp_path: Path) -> None:
    write(tmp_path)
    runner = runner_with(llama, tmp_path, "mlp_speculator", 3)
    full, own = runner.weight_bytes, runner.drafter.weight_bytes
    assert 0 < own < full and runner.drafter.block_bytes == 0
    call(runner, "sleep", [2], {})
    assert runner.weight_bytes == 0
    call(runner, "wake_up", [None], {})
    assert runner.weight_bytes == full
    driver = SpeculativeDriver(runner, wanted=lambda step, slot: 2)
    sequence = driver.add(0, [5, 6, 7], GREEDY)
    driver.run([sequence], 3)
    assert [len(p.drafts) for p in sequence.proposals] == [2] * len(sequence.proposals)


def test_quantised_weights(llama: Path, tmp_path: Path) -> None:
    write(tmp_path)
    plain = runner_with(llama, tmp_path, "mlp_speculator", 3)
    speculative = SpeculativeConfig("mlp_speculator", str(tmp_path), 3, quantization="int8")
    runner, _ = load_runner(llama, speculative=speculative)
    assert runner.drafter.weight_bytes < plain.drafter.weight_bytes


@pytest.mark.parametrize(
    ("changes", "num_drafts", "reason"),
    [
        ({"vocab_size": 100}, 3, "has a vocabulary of 100 tokens, and the model one of 128"),
        ({"emb_dim": 60}, 3, "is for hidden states of 60 numbers, and those of the model have 64"),
        ({}, 5, "num_speculative_tokens is 5, but .* predicts 3 tokens"),
        ({"model_type": "llama"}, 3, "is no MLP speculator"),
        ({"n_predict": "many"}, 3, "cannot be used"),
    ],
)
def test_what_does_not_fit_is_refused(
    plain: Runner, tmp_path: Path, changes: dict[str, Any], num_drafts: int, reason: str
) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | changes))
    if "emb_dim" in changes:
        write(tmp_path, **changes)
    with pytest.raises(LoadError, match=reason):
        open_for(plain, tmp_path, "mlp_speculator", num_drafts)


def test_missing_and_misshapen_weights_are_refused(plain: Runner, tmp_path: Path) -> None:
    _, tensors = write(tmp_path)
    tensors["head.1.weight"] = torch.zeros(VOCAB_SIZE, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"token 1 of the MLP speculator .* have the sizes"):
        open_for(plain, tmp_path, "mlp_speculator", 3)
    del tensors["ln.2.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"lacks the weight ln\.2\.bias"):
        open_for(plain, tmp_path, "mlp_speculator", 3)
