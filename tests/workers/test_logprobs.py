"""What shows that a model is right: log probabilities in float32 on both sides, of weights that all matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.workers.module import configuration
from tests.workers import biting
from tests.workers.architectures import SERVED, VOCAB_SIZE
from tests.workers.driver import load_runner
from tests.workers.logprobs import (
    MIN_DISTINCT,
    PERMITTED,
    difference,
    flatness,
    forward_logprobs,
    loaded_in_float32,
    our_logprobs,
)
from tests.workers.parity import make_prompts, our_tokens, transformers_tokens


def test_both_sides_are_in_float32_on_any_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where "auto" means bfloat16, in which tokens and numbers of a right model are others."""
    folder = SERVED["llama"].write(tmp_path)
    monkeypatch.setattr(configuration, "auto_dtype", lambda checkpoint, isa: "bfloat16")
    _, ready = load_runner(folder)
    assert ready.dtype == "bfloat16"
    prompts = make_prompts(VOCAB_SIZE)
    assert our_tokens(folder, prompts) == transformers_tokens(folder, prompts)
    model = loaded_in_float32(folder)
    for text in our_logprobs(folder, VOCAB_SIZE):
        assert difference(text.logprobs, forward_logprobs(model, text.token_ids)[:-1]) < PERMITTED


def part(model: Any, name: str) -> torch.nn.Parameter:
    """A weight of a module."""
    parameter: torch.nn.Parameter = model.get_parameter(name)
    return parameter


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.self_attn.v_proj.bias",
        "model.layers.0.mlp.down_proj.bias",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.post_attention_layernorm.weight",
    ],
)
def test_a_vector_that_is_left_out_shows(name: str, tmp_path: Path) -> None:
    folder = SERVED["llama with biases"].write(tmp_path)
    model = loaded_in_float32(folder)
    text = make_prompts(VOCAB_SIZE, (41,))[0]
    before = forward_logprobs(model, text)
    with torch.no_grad():
        part(model, name).fill_(1.0 if name.endswith("norm.weight") else 0.0)
    assert difference(forward_logprobs(model, text), before) > 10 * PERMITTED


def test_a_flat_model_proves_nothing(tmp_path: Path) -> None:
    texts = make_prompts(VOCAB_SIZE, (41, 5, 23))
    model = loaded_in_float32(SERVED["llama"].write(tmp_path))
    assert flatness(model, texts) == ""
    with torch.no_grad():
        head = model.lm_head.weight.clone()
        model.lm_head.weight.mul_(1e-4)
        assert "entropy" in flatness(model, texts)
        model.lm_head.weight.copy_(head)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        assert "order of tokens" in flatness(model, texts)
        model.lm_head.weight[MIN_DISTINCT - 2 :] = 0
        model.lm_head.weight[: MIN_DISTINCT - 2] *= 100
        assert "different tokens" in flatness(model, texts)


def test_settings_bite_one_by_one() -> None:
    """Those that a family has; one that it refuses is left out, and the others stay."""
    from transformers import AutoModelForCausalLM

    config, changed = biting.bitten(AutoModelForCausalLM, SERVED["deepseek_v3"].config())
    assert {"n_group", "topk_group", "attention_bias", "norm_topk_prob", "rope_parameters"} <= changed
    assert config.rope_parameters["rope_type"] == "yarn" and config.n_group == 2
    before = SERVED["deepseek_v3"].config()
    assert config.tie_word_embeddings != before.tie_word_embeddings
    assert config.num_hidden_layers == before.num_hidden_layers
