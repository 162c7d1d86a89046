"""EAGLE-3 heads against a plain implementation of their arithmetic, on random checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from pagewire.ipc.wire.params import SamplingParams
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.fit import sizes_of
from pagewire.workers.process.calls import call
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import GROUPED, SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import GREEDY, Driver
from tests.workers.parity import make_prompts
from tests.workers.speculation.speculating import Proposal, SpeculativeDriver, open_for, runner_with

NUM_LAYERS, PLACES = 7, (2, 3, 4)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, NUM_LOGITS = 64, 4, 2, 16, 80, 96
SETTINGS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": NUM_LOGITS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with as many layers as three places take."""
    fields = GROUPED | {"num_hidden_layers": NUM_LAYERS}
    return Architecture("llama", fields).write(tmp_path_factory.mktemp("seven"), seed=2)


@pytest.fixture(scope="module")
def plain(model: Path) -> Runner:
    """The model without a drafter."""
    return runner_with(model, None)


def write(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A random head; returns its settings and weights."""
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    kv = KV_HEADS * HEAD_DIM
    tensors = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": 2 * random(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": 2 * random(kv, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(kv, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
        "lm_head.weight": random(NUM_LOGITS, HIDDEN),
        "d2t": torch.arange(NUM_LOGITS) // 3,
        "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool),
    }
    for name in (
        "midlayer.input_layernorm",
        "midlayer.hidden_norm",
        "midlayer.post_attention_layernorm",
        "norm",
    ):
        tensors[f"{name}.weight"] = 1 + random(HIDDEN)
    if changes.pop("own_embedding", False):
        tensors["embed_tokens.weight"] = random(VOCAB_SIZE, HIDDEN)
    settings = SETTINGS | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return settings, tensors


class Oracle:
    """A head in plain PyTorch, on the states that transformers finds in the model."""

    def __init__(self, model: Path, settings: dict[str, Any], weights: dict[str, Tensor]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.settings = settings
        self.weights = {name.removeprefix("midlayer."): tensor for name, tensor in weights.items()}
        ids = settings.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        self.places = PLACES if ids is None else [i + 1 for i in ids]

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens after these."""
        found = self.model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([found[place][0] for place in self.places], -1)
        states, drafts = features @ self.weights["fc.weight"].T, list[int]()
        for _ in range(count):
            out = self.layer(states, [*tokens[1:], *drafts])
            logits = self.norm(out[-1:], "norm") @ self.weights["lm_head.weight"].T
            entry = int(logits.argmax())
            drafts.append(entry + int(self.weights["d2t"][entry]))
            states = torch.cat([states, out[-1:]])
        return drafts

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(
            x, (HIDDEN,), self.weights[f"{name}.weight"], self.settings["rms_norm_eps"]
        )

    def layer(self, states: Tensor, token_ids: list[int]) -> Tensor:
        """Outputs [T, H] at all positions, from states [T, H] and the token after each."""
        table = self.weights.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        normed = self.norm(states, "hidden_norm")
        x = torch.cat([self.norm(table[token_ids], "input_layernorm"), normed], -1)
        q, k, v = (
            (x @ self.weights[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, HEAD_DIM).transpose(0, 1)
            for name in "qkv"
        )
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(len(x)).float(), frequencies)
        q, k = (rotated(y, angles) for y in (q, k))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        residual = normed if self.settings.get("norm_before_residual") else states
        y = residual + attended.reshape(len(x), -1) @ self.weights["self_attn.o_proj.weight"].T
        x = self.norm(y, "post_attention_layernorm")
        gate, up = (x @ self.weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return y + (functional.silu(gate) * up) @ self.weights["mlp.down_proj.weight"].T

    def check(self, proposals: list[Proposal]) -> None:
        assert proposals
        for proposal in proposals:
            assert self.drafts(proposal.before, len(proposal.drafts)) == proposal.drafts


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Heads [n, T, D] turned by angles [T, D / 2]: entry i with entry i + D / 2."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "own_embedding": True},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}},
    ],
    ids=["plain", "other residual", "other layers"],
)
def test_drafts_are_those_of_the_formula(model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Prompts in chunks, drafts that are wrong, steps without drafts, a preemption, and other lengths."""
    oracle = Oracle(model, *write(tmp_path, **changes))
    runner = runner_with(model, tmp_path, "eagle3", 4)
    driver = SpeculativeDriver(runner, 13, lambda step, slot: (step + slot) % 5)
    prompts = make_prompts(VOCAB_SIZE)
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(prompts)]
    driver.run(sequences, 7)
    driver.end(sequences[0])
    again = driver.add(5, sequences[0].tokens, GREEDY, num_prompt_tokens=len(prompts[0]))
    driver.run([*sequences[1:], again], 12)
    oracle.check([p for s in [*sequences, again] for p in s.proposals])


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0, logprobs=1)], ids=["greedy", "sampled"]
)
def test_they_change_nothing(model: Path, plain: Runner, tmp_path: Path, params: SamplingParams) -> None:
    write(tmp_path)
    prompts = make_prompts(VOCAB_SIZE)
    expected = Driver(plain).generate(prompts, 9, params)
    driver = SpeculativeDriver(runner_with(model, tmp_path, "eagle3", 4), wanted=lambda *_: 4)
    sequences = [driver.add(i, prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    driver.run(sequences, 9)
    assert [s.output[:9] for s in sequences] == expected


def test_states_within_the_model_cost_no_bit(tmp_path: Path) -> None:
    """In bfloat16: the stack runs in parts, and gives the logits of the whole."""
    fields = GROUPED | {"num_hidden_layers": NUM_LAYERS}
    folder = Architecture("llama", fields).write(tmp_path / "model", dtype="bfloat16")
    write(tmp_path / "head")
    params = SamplingParams(temperature=1.0, logprobs=5)
    prompts = make_prompts(VOCAB_SIZE)
    whole, parts = (
        Driver(runner).run(prompts, 8, params)
        for runner in (runner_with(folder, None), runner_with(folder, tmp_path / "head", "eagle3", 4))
    )
    assert [(s.output, s.logprobs) for s in parts] == [(s.output, s.logprobs) for s in whole]


def test_sleep_includes_the_head(model: Path, tmp_path: Path) -> None:
    oracle = Oracle(model, *write(tmp_path))
    runner = runner_with(model, tmp_path, "eagle3", 4)
    full = runner.memory()
    assert full["kv_cache"] == 64 * runner.block_bytes + runner.drafter.spare_bytes
    expected = sizes_of(read_headers(model), runner.config, "avx2").drafter
    assert expected is not None
    assert expected.kv_token_bytes * runner.config.block_size == runner.drafter.block_bytes
    call(runner, "sleep", [2], {})
    asleep = runner.memory()
    assert asleep["weights"] == asleep["kv_cache"] == 0
    call(runner, "wake_up", [None], {})
    assert all(runner.memory()[name] == full[name] for name in ("weights", "kv_cache"))
    driver = SpeculativeDriver(runner, wanted=lambda *_: 4)
    sequence = driver.add(0, [5, 6, 7], GREEDY)
    driver.run([sequence], 4)
    oracle.check(sequence.proposals)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 100}, "for a vocabulary of 100 tokens, and the model has 128"),
        ({"hidden_size": 32}, r"has the shape \(64, 192\), not \(32, 192\)"),
        ({"draft_vocab_size": 90}, r"head of the EAGLE-3 head .* not \(90, 64\)"),
        ({"num_hidden_layers": 2}, "has 2 layers"),
        ({"hidden_act": "mish"}, "the activation 'mish'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "after the layers 2, 3, 10, and"),
        ({"num_attention_heads": "four"}, "cannot be used"),
        ({"num_attention_heads": 0}, "cannot be used"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "cannot be used"),
    ],
)
def test_what_does_not_fit_is_refused(
    plain: Runner, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    write(tmp_path, **changes)
    with pytest.raises(LoadError, match=reason):
        open_for(plain, tmp_path, "eagle3", 4)


def test_models_and_checkpoints_that_lack_something_are_refused(
    llama: Path, plain: Runner, tmp_path: Path
) -> None:
    _, tensors = write(tmp_path)
    with pytest.raises(LoadError, match="after the layers 2, 1, -1, and the model has 2"):
        runner_with(llama, tmp_path, "eagle3", 4)
    other = SERVED["diffllama"].write(tmp_path / "other")
    with pytest.raises(
        LoadError,
        match=r"diffllama is served without speculative_config \(the methods ngram and suffix work\)",
    ):
        runner_with(other, tmp_path, "eagle3", 4)
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"lacks the weight norm\.weight"):
        open_for(plain, tmp_path, "eagle3", 4)
