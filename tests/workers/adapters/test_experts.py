"""LoRA on the experts of mixtures, and on their choice: PEFT over transformers is the oracle, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.ipc.wire.params import SamplingParams
from tests.workers.architectures import SERVED, VOCAB_SIZE
from tests.workers.driver import Driver, Request
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import make_prompts, transformers_tokens
from tests.workers.peft_adapters import AdaptedRunner, peft_tokens, write_adapter
from tests.workers.random_adapters import Tensors, make_tensors, write

PROMPTS = make_prompts(VOCAB_SIZE, (23, 5, 17))
NUM_TOKENS = 8
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"target_modules": ["q_proj"], "target_parameters": [*STACKED, "mlp.gate.weight"]},
    "qwen2_moe": {
        "target_modules": ["shared_expert_gate", "k_proj"],
        "target_parameters": STACKED,
        "rank_pattern": {r"layers\.1\.mlp\.experts\.gate_up_proj": 2},
        "alpha_pattern": {"down_proj": 24},
    },
    "gpt_oss": {"target_modules": ["o_proj"], "target_parameters": STACKED},
    "granitemoe": {
        "target_modules": ["q_proj"],
        "target_parameters": [name.replace("mlp", "block_sparse_moe") for name in STACKED],
    },
    "glm4_moe": {"target_modules": ["q_proj"], "target_parameters": [*STACKED, "mlp.gate.weight"]},
    "minimax_m3_vl_text": {"target_modules": ["q_proj"], "target_parameters": STACKED},
    "olmoe": {"target_modules": [], "target_parameters": STACKED[1:], "use_rslora": True},
}
"""Matrices that lie transposed with biases; one parameter of two; other names; experts that every token gets."""
SEPARATE = {
    "mixtral": ("model.layers.{}.block_sparse_moe", ("w1", "w3", "w2"), 100, "gate"),
    "qwen3_moe": ("model.layers.{}.mlp", ("gate_proj", "up_proj", "down_proj"), 36, None),
}


def separate(name: str, folder: Path, change: Mapping[str, Any] | None = None) -> Path:
    """An adapter of every expert's own linear layers, as PEFT saved it with transformers 4; four experts."""
    block, leaves, size, router = SEPARATE[name]
    shapes = {}
    for layer in range(2):
        for expert in range(4):
            for leaf in leaves:
                shape = (64, size) if leaf == leaves[-1] else (size, 64)
                shapes[f"{block.format(layer)}.experts.{expert}.{leaf}"] = shape
        if router is not None:
            shapes[f"{block.format(layer)}.{router}"] = (4, 64)
    targets = [*leaves, *([] if router is None else [router])]
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 0.5, "target_modules": targets, **(change or {})}
    return write(folder, settings, make_tensors(7, shapes))


def generate(runner: AdaptedRunner, adapters: list[int]) -> list[list[int]]:
    return Driver(runner.runner).generate(PROMPTS, NUM_TOKENS, adapters=adapters)


@pytest.mark.parametrize("name", KINDS)
def test_stacked_parameters(name: str, tmp_path: Path) -> None:
    model = SERVED[name].write(tmp_path / "model")
    adapter = write_adapter(model, tmp_path / "adapter", 1, 0.5, r=4, **KINDS[name])
    runner = AdaptedRunner(model)
    assert runner.runner.model.is_stack
    runner.load_all([adapter])
    expected = peft_tokens(model, [adapter, None, adapter], PROMPTS, NUM_TOKENS)
    assert generate(runner, [1, 0, 1]) == expected
    assert expected != transformers_tokens(model, PROMPTS)


@pytest.mark.parametrize("name", SEPARATE)
def test_linear_layers_of_each_expert_beside_stacked_ones(name: str, tmp_path: Path) -> None:
    """Also over two ranks, where the halves of a joined matrix are divided each by itself."""
    model = SERVED[name].write(tmp_path / "model")
    older = separate(name, tmp_path / "older")
    later = write_adapter(
        model, tmp_path / "later", 1, 0.5, r=3, target_modules=[], target_parameters=STACKED
    )
    expected = peft_tokens(model, [older, None, later], PROMPTS, NUM_TOKENS)

    def work(rank: Rank | None) -> list[list[int]]:
        runner = AdaptedRunner(model, collective=rank)
        runner.load_all([older, later])
        return generate(runner, [1, 0, 2])

    assert work(None) == expected
    assert list(run_ranks(2, work)) == [expected] * 2


def test_transposed_experts_over_two_ranks(tmp_path: Path) -> None:
    model = SERVED["gpt_oss"].write(tmp_path / "model")
    adapter = write_adapter(model, tmp_path / "adapter", 1, 0.5, r=4, **KINDS["gpt_oss"])

    def work(rank: Rank) -> list[list[int]]:
        runner = AdaptedRunner(model, collective=rank)
        runner.load_all([adapter])
        return generate(runner, [1, 0, 1])

    expected = peft_tokens(model, [adapter, None, adapter], PROMPTS, NUM_TOKENS)
    assert list(run_ranks(2, work)) == [expected] * 2


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_bits_are_the_same_alone_and_among_other_adapters(name: str, tmp_path: Path) -> None:
    model = SERVED[name].write(tmp_path / "model")
    adapters = [
        write_adapter(model, tmp_path / str(seed), seed, 0.5, r=rank, **KINDS[name])
        for seed, rank in enumerate((1, 4, 19))
    ]
    runner = AdaptedRunner(model, dtype="bfloat16")
    runner.load_all(adapters)
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0)
    prompts, indices = [*PROMPTS, PROMPTS[0]], [1, 2, 3, 0]

    def bits(request: Request) -> Any:
        of_prompt = [rows.logprobs.tolist() for rows in request.prompt_logprobs]
        return request.output, request.logprobs, list(chain.from_iterable(of_prompt))

    together = Driver(runner.runner, 64).run(prompts, NUM_TOKENS, params, adapters=indices)
    assert len({tuple(request.output) for request in together}) > 2
    for prompt, index, request in zip(prompts, indices, together, strict=True):
        (alone,) = Driver(runner.runner, 64).run([prompt], NUM_TOKENS, params, adapters=[index])
        assert bits(alone) == bits(request), index


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SERVED["mixtral"].write(tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def runner(mixtral: Path) -> AdaptedRunner:
    return AdaptedRunner(mixtral)


EXPERT = "base_model.model.model.layers.0.block_sparse_moe.experts.{}.w1"
UP, DOWN = (f"base_model.model.model.layers.0.mlp.experts{part}.lora_" for part in (".base_layer", ""))


def stacked_tensors() -> Tensors:
    """Of both parameters of the first layer's experts."""
    shapes = {UP: (64, 200), DOWN: (100, 64)}
    tensors = {}
    for name, (num_in, num_out) in shapes.items():
        tensors |= {f"{name}A.weight": torch.randn(16, num_in), f"{name}B.weight": torch.randn(num_out, 16)}
    return tensors


SETTINGS = {"peft_type": "LORA", "r": 4, "target_modules": []}
FIRST_LAYER = [f"layers.0.{parameter}" for parameter in STACKED]


def refusal(runner: AdaptedRunner, folder: Path) -> str:
    message = runner.load(1, folder)
    assert message.error is not None and message.error_type == "ValueError"
    return message.error


def test_wrong_separate_experts_are_refused(runner: AdaptedRunner, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = separate("mixtral", tmp_path)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    a, b = (tensors[f"{EXPERT.format(2)}.lora_{kind}.weight"] for kind in "AB")
    changes: list[tuple[dict[str, Any], str]] = [
        (
            {f"{EXPERT.format(2)}.lora_A.weight": None, f"{EXPERT.format(2)}.lora_B.weight": None},
            "are missing",
        ),
        ({f"{EXPERT.format(4)}.lora_A.weight": a, f"{EXPERT.format(4)}.lora_B.weight": b}, "4 experts"),
        ({f"{EXPERT.format(2)}.lora_magnitude_vector": torch.ones(100)}, "only lora_A and lora_B are served"),
        ({f"{EXPERT.format(2)}.lora_B.weight": None}, "only lora_A and lora_B are served"),
        ({f"{EXPERT.format(2)}.lora_B.weight": torch.ones(101, 4)}, r"needs \(100, 4\)"),
    ]
    for change, text in changes:
        changed = {n: tensor.clone() for n, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(changed, file)
        with pytest.raises(ValueError, match=text):
            raise ValueError(refusal(runner, folder))


def test_wrong_stacked_parameters_are_refused(runner: AdaptedRunner, tmp_path: Path) -> None:
    good = stacked_tensors()
    changes: list[tuple[dict[str, Any], Tensors, str]] = [
        ({"target_parameters": ["layers.0.mlp.experts.down_proj"]}, good, "target_parameters does not name"),
        (
            {"target_parameters": STACKED},
            good,
            r"tensors of 'model.layers.1.mlp.experts.gate_up_proj' are missing",
        ),
        ({"target_parameters": FIRST_LAYER, "r": 2}, good, "has rank 4, its configuration says 2"),
        (
            {"target_parameters": FIRST_LAYER[::-1]},
            {name.replace(".base_layer", ""): t for name, t in good.items() if UP in name},
            r"needs \(16, 100\)",
        ),
        (
            {"target_parameters": FIRST_LAYER},
            good | {f"{DOWN}B.bias": torch.ones(64)},
            "only lora_A and lora_B",
        ),
        (
            {"target_parameters": [*FIRST_LAYER, "layers.0.mlp.gate.weight"]},
            good,
            "tensors of 'model.layers.0.mlp.gate' are missing",
        ),
    ]
    for number, (change, tensors, text) in enumerate(changes):
        with pytest.raises(ValueError, match=text):
            raise ValueError(refusal(runner, write(tmp_path / str(number), SETTINGS | change, tensors)))
    loaded = runner.load(1, write(tmp_path / "good", SETTINGS | {"target_parameters": FIRST_LAYER}, good))
    assert (loaded.error, loaded.rank) == (None, 4)
    # 64 outputs lie together: 4 experts of rank 4 with 256 outputs of 64 inputs, and 64 of 100.
    assert loaded.num_bytes == 4 * 4 * 4 * (64 + 256 + 100 + 64)
