"""Configurations with more layers than anybody can make objects of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire.engine_core.config.config import EngineConfig
from pagewire.ipc.counts import MAX_LAYERS, check_counts
from pagewire.ipc.options.engine_args import EngineArgs


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 1e9},
        {"n_layer": MAX_LAYERS + 1},
        {"n_routed_experts": 10**30},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"vision_config": {"depth": 10**9}},
        {"num_labels": 10**9},
    ],
    ids=repr,
)
def test_too_many_layers_experts_or_labels_are_refused_by_the_name_of_their_setting(
    config: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=r"is .*, and at most (4096|16384|131072) are served") as caught:
        check_counts(config)
    assert any(name in str(caught.value) for name in ("layer", "experts", "depth", "labels"))


def test_other_settings_may_be_large_and_a_configuration_deep() -> None:
    config: dict[str, Any] = {
        "num_hidden_layers": MAX_LAYERS,
        "expert_intermediate_size": 14336,
        "num_labels": 20_000,
        "layers": None,
    }
    for _ in range(5000):
        config = {"text_config": config, "max_position_embeddings": 10**9, "layer_types": ["full"] * 2}
    check_counts(config)


def test_a_core_does_not_start_with_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1000000000}')
    with pytest.raises(ValueError, match="num_hidden_layers is 1000000000, and at most"):
        EngineConfig.resolve(EngineArgs(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="n_layer is 5000, and at most"):
        EngineConfig.resolve(EngineArgs(str(tmp_path), hf_overrides={"n_layer": 5000}))
