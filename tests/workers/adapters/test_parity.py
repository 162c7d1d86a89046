"""Tokens of models with LoRA adapters: PEFT over transformers is the oracle, greedily in float32."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.params import SamplingParams
from pagewire.workers.model.stack import DecoderStack

from ..architectures import GROUPED, VOCAB_SIZE, Architecture
from ..driver import Driver, Request
from ..parity import NUM_TOKENS, make_prompts, transformers_tokens
from ..peft_adapters import AdaptedRunner, peft_tokens, write_adapter

PROMPTS = make_prompts(VOCAB_SIZE, (23, 5, 17, 1, 9, 12, 6))
KINDS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "rank 8": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear", "bias": "all"},
    "rank 64 rslora": {
        "r": 64,
        "lora_alpha": 2,
        "target_modules": r".*\.(k|o|up|down)_proj",
        "use_rslora": True,
    },
    "patterns": {
        "r": 4,
        "target_modules": ["q_proj", "gate_proj", "down_proj"],
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
        "alpha_pattern": {"gate_proj": 20},
        "exclude_modules": ["layers.0.self_attn.q_proj"],
    },
    "dora": {"r": 4, "target_modules": "all-linear", "use_dora": True},
    "whole modules": {
        "r": 2,
        "target_modules": ["k_proj", "down_proj"],
        "layers_to_transform": [1],
        "modules_to_save": ["embed_tokens", "lm_head", "up_proj"],
    },
}
LLAMA = Architecture("llama", GROUPED | {"attention_bias": True})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LLAMA.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(model, folder / name, seed, **fields)
        for seed, (name, fields) in enumerate(KINDS.items())
    ]


@pytest.fixture(scope="module")
def runner(model: Path, adapters: list[Path]) -> AdaptedRunner:
    runner = AdaptedRunner(model)
    messages = runner.load_all(adapters)
    assert [message.rank for message in messages] == [1, 8, 64, 6, 4, 2]
    assert all(message.num_bytes > 0 and len(message.content) == 32 for message in messages)
    return runner


def test_adapters_of_all_kinds_beside_the_model_in_one_batch(
    model: Path, adapters: list[Path], runner: AdaptedRunner
) -> None:
    assert runner.runner.model.is_stack
    base: Any = runner.runner.model.model.base
    assert isinstance(base, DecoderStack) and base.stack.compiled is not None
    indices = [0, *range(1, len(adapters) + 1)]
    actual = Driver(runner.runner).generate(PROMPTS, NUM_TOKENS, adapters=indices)
    expected = peft_tokens(model, [None, *adapters], PROMPTS)
    for name, ours, theirs in zip(["none", *KINDS], actual, expected, strict=True):
        assert ours == theirs, name
    plain = transformers_tokens(model, PROMPTS)
    assert [ours == theirs for ours, theirs in zip(actual, plain, strict=True)] == [True] + [False] * 6


def test_bits_are_the_same_alone_and_among_others(runner: AdaptedRunner) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0)

    def bits(request: Request) -> Any:
        of_prompt = [rows.logprobs.tolist() for rows in request.prompt_logprobs]
        return request.output, request.logprobs, list(chain.from_iterable(of_prompt))

    indices = [0, 1, 2, 3, 4, 5, 6]
    together = Driver(runner.runner, 64).run(PROMPTS, NUM_TOKENS, params, adapters=indices)
    for prompt, index, request in zip(PROMPTS, indices, together, strict=True):
        (alone,) = Driver(runner.runner, 64).run([prompt], NUM_TOKENS, params, adapters=[index])
        assert bits(alone) == bits(request), index
