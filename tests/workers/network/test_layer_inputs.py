"""Gemma 4 as a network: shared keys, heads of two sizes, values that are keys, and what tokens give each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire.kernels.cpu import library
from pagewire.workers.network.network import Network
from pagewire.workers.run.runner import Runner
from pagewire.workers.weight_cache import folder as cache_folder
from tests.workers.architectures import GEMMA4, GEMMA4_LARGE, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.parity import make_prompts, transformers_tokens
from tests.workers.weight_cache.test_cached_loading import keep, outputs, start, without_transformers

PROMPTS = make_prompts(VOCAB_SIZE)
FIELDS: dict[str, dict[str, Any]] = {
    "all": {},
    "states alone": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "values are keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "wide halves": {"use_double_wide_mlp": True},
    "own keys": {"num_kv_shared_layers": 0},
    "a cap": {"final_logit_softcapping": 3.0},
}


def network_of(runner: Runner) -> Network:
    base = runner.model.model.base
    assert isinstance(base, Network)
    return base


@pytest.mark.parametrize("form", FIELDS)
def test_a_network_has_the_tokens_of_transformers(form: str, tmp_path: Path) -> None:
    model = Architecture("gemma4_text", GEMMA4 | FIELDS[form]).write(tmp_path)
    runner, _ = load_runner(model)
    network = network_of(runner)
    assert not runner.decoding.why_not
    assert Driver(runner).generate(PROMPTS, 8) == transformers_tokens(model, PROMPTS, 8)
    layers = network.stack.layers
    assert (network.layer_inputs is None) == (form == "states alone") == (layers[0].input_gate is None)
    assert any(layer.values_are_keys for layer in layers) == (form == "values are keys")
    assert {layer.head_dim for layer in layers} == {16, 32}
    sources = [place.shape.source for place in network.places if place is not None]
    assert sources == [None, None, None, *([None, None] if form in ("own keys", "states alone") else [2, 1])]


def test_the_kv_cache_has_no_memory_for_keys_of_other_layers(tmp_path: Path) -> None:
    per_block = [
        load_runner(Architecture("gemma4_text", GEMMA4 | FIELDS[form]).write(tmp_path / form))[
            1
        ].bytes_per_block
        for form in ("all", "own keys")
    ]
    assert per_block[0] < per_block[1]


@pytest.mark.parametrize("size", [0, 8], ids=["states alone", "inputs of layers"])
def test_experts_beside_a_dense_half(size: int, tmp_path: Path) -> None:
    """They take the sum before it; there may be inputs of layers, too."""
    model = Architecture("gemma4_text", GEMMA4_LARGE | {"hidden_size_per_layer_input": size}).write(tmp_path)
    runner, _ = load_runner(model)
    network = network_of(runner)
    mixtures = [layer.mixture for layer in network.stack.layers]
    assert all(mixture is not None and mixture.of_sum is not None for mixture in mixtures)
    assert (network.layer_inputs is None) == (size == 0)
    assert not runner.decoding.why_not
    assert Driver(runner).generate(PROMPTS, 8) == transformers_tokens(model, PROMPTS, 8)


@pytest.mark.parametrize("fields", [GEMMA4, GEMMA4_LARGE], ids=["", "with experts"])
def test_it_is_kept_as_packed_weights(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.choose() is None:
        pytest.skip("there are no compiled kernels here")
    monkeypatch.setattr(cache_folder, "cache_root", lambda: tmp_path / "cache")
    model = Architecture("gemma4_text", fields).write(tmp_path / "model")
    first, ahead = start(model)
    assert len(keep(first, ahead)) == 1
    without_transformers(monkeypatch)
    second, _ = start(model)
    assert second.model.weight_bytes == first.model.weight_bytes
    assert outputs(second) == outputs(first)
