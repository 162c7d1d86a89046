"""Where models of transformers have the parts of a network: what no served architecture shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from pagewire.workers.families.structures import UNKNOWN_ROUTER
from pagewire.workers.module.structure import STACKED_HYBRIDS
from pagewire.workers.network.network import Network
from tests.workers.architectures import SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.parity import make_prompts, transformers_tokens

MELLUM = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}


def test_layers_that_do_not_name_their_kind_have_the_angles_of_the_configuration(tmp_path: Path) -> None:
    if "mellum" not in CONFIG_MAPPING_NAMES:
        pytest.skip("this transformers does not have Mellum")
    model = Architecture("mellum", MELLUM).write(tmp_path)
    runner, _ = load_runner(model)
    prompts = make_prompts(VOCAB_SIZE)
    assert Driver(runner).generate(prompts, 12) == transformers_tokens(model, prompts, 12)


def test_gates_of_attention_have_no_biases_where_queries_have_some(tmp_path: Path) -> None:
    """And embeddings are not scaled where a setting says so."""
    fields = SERVED["afmoe"].fields | {"attention_bias": True, "mup_enabled": False}
    model = Architecture("afmoe", fields).write(tmp_path)
    base = load_runner(model)[0].model.model.base
    assert isinstance(base, Network) and base.stack.compiled is not None
    assert all(layer.gated_queries for layer in base.stack.layers)
    assert [layer.angles for layer in base.stack.layers] == [0, None]
    prompts = make_prompts(VOCAB_SIZE)
    assert Driver(load_runner(model)[0]).generate(prompts, 12) == transformers_tokens(model, prompts, 12)


@pytest.mark.parametrize("fields", [{}, {"v_head_dim": 16, "attention_value_scale": None}], ids=["", "equal"])
def test_values_of_another_size_than_keys(fields: dict[str, Any], tmp_path: Path) -> None:
    """In layers with numbers of heads of their own; some have sinks, and values are scaled."""
    model = Architecture("mimo_v2_flash", SERVED["mimo_v2_flash"].fields | fields).write(tmp_path)
    runner, _ = load_runner(model)
    base, size = runner.model.model.base, fields.get("v_head_dim", 12)
    assert isinstance(base, Network)
    shapes = [place.shape for place in base.places if place is not None]
    assert [(shape.num_kv_heads, shape.v_head_dim) for shape in shapes] == [(2, size), (4, size)]
    assert [layer.value_scale for layer in base.stack.layers] == [1.0 if fields else 0.707] * 2
    assert [layer.terms.sinks is None for layer in base.stack.layers] == [True, False]
    prompts = make_prompts(VOCAB_SIZE)
    assert Driver(runner).generate(prompts, 12) == transformers_tokens(model, prompts, 12)


MULTIPLIED = {  # what Falcon-H1 multiplies by numbers
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.6, 1.4],
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
}
HYBRIDS = {
    "falcon_h1 with multipliers": ("falcon_h1", MULTIPLIED | {"mlp_bias": True, "projectors_bias": True}),
    "falcon_h1 with norms": ("falcon_h1", MULTIPLIED | {"mamba_rms_norm": True}),
    "falcon_h1 with norms before gates": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "attention_bias": True},
    ),
    "lfm3 without gates and norms": (
        "lfm3",
        {"use_attention_gate": False, "use_sandwich_norm": False, "attention_bias": True},
    ),
    "lfm3 with a window": (
        "lfm3",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "conv", "full_attention"],
            "sliding_window": 7,
        },
    ),
    "olmo_hybrid with rotation": (
        "olmo_hybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "nemotron_h with groups of experts": (
        "nemotron_h",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
}
"""Settings of hybrids that run as stacks, beside those of the architectures that are served."""


@pytest.mark.parametrize("name", sorted(STACKED_HYBRIDS - {"bailing_hybrid"}))
def test_hybrids_run_as_a_stack(name: str, tmp_path: Path) -> None:
    """Their tokens are compared with the other architectures'."""
    runner, _ = load_runner(SERVED[name].write(tmp_path))
    assert str(runner.model.road) == "stack" and not runner.decoding.why_not


@pytest.mark.parametrize("name", HYBRIDS)
def test_other_settings_of_hybrids(name: str, tmp_path: Path) -> None:
    model_type, fields = HYBRIDS[name]
    model = Architecture(model_type, SERVED[model_type].fields | fields).write(tmp_path)
    runner, _ = load_runner(model)
    assert str(runner.model.road) == "stack" and not runner.decoding.why_not
    prompts = make_prompts(VOCAB_SIZE)
    assert Driver(runner).generate(prompts, 12) == transformers_tokens(model, prompts, 12)


@pytest.mark.parametrize(
    ("name", "fields", "kwargs", "road"),
    [
        (
            "falcon_h1",
            {"attention_in_multiplier": 0.9, "attention_bias": True},
            {},
            "module: its attention multiplies what layers with biases take",
        ),
        (
            "falcon_h1",
            {"ssm_in_multiplier": 0.9, "mamba_proj_bias": True},
            {},
            "module: its mixers multiply what a layer with a bias takes",
        ),
        (
            "falcon_h1",
            {"key_multiplier": 0.9},
            {"quantization": "int8"},
            "module: what its quantised weights give is multiplied by numbers",
        ),
        (
            "nemotron_h",
            {"moe_latent_size": 16},
            {},
            f"stack with 1 half that is a module: {UNKNOWN_ROUTER}",
        ),
    ],
)
def test_hybrids_that_run_as_modules(
    name: str, fields: dict[str, Any], kwargs: dict[str, Any], road: str, tmp_path: Path
) -> None:
    model = Architecture(name, SERVED[name].fields | fields).write(tmp_path)
    runner, _ = load_runner(model, **kwargs)
    assert str(runner.model.road) == road
    prompts = make_prompts(VOCAB_SIZE)
    if not kwargs:
        assert Driver(runner).generate(prompts, 6) == transformers_tokens(model, prompts, 6)
