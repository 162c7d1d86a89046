"""Lengths over the model's, which are refused before a worker starts."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.engine_core.config.config import EngineConfig
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.positions import longest_sequence, too_long


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"n_positions": 7, "n_ctx": 9}, 7),
        ({"max_position_embeddings": 5, "text_config": {"max_position_embeddings": 8}}, 8),
        ({"max_position_embeddings": None, "seq_length": True, "max_seq_len": -1}, None),
        ({}, None),
    ],
)
def test_the_longest_sequence_of_a_configuration(config: dict[str, Any], longest: int | None) -> None:
    assert longest_sequence(config) == longest


def test_lengths_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert too_long(None, 5) is None and too_long(9, None) is None and too_long(5, 5) is None
    why = "max_model_len 6 exceeds the model's limit of 5 positions"
    assert str(too_long(6, 5)).startswith(why)
    monkeypatch.setenv("PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert too_long(6, 5) is None


def test_a_configuration_with_it_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len 100000 exceeds the model's limit of 1024 positions"):
        EngineConfig.resolve(EngineArgs("demo", max_model_len=100_000))
