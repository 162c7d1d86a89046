"""Sampling parameters of requests that give none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagewire.frontend.requests.checked_params import (
    USUAL,
    USUAL_LENGTH,
    default_sampling_params,
    local_sampling_params,
)
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.params import SamplingParams


@pytest.fixture
def info(engine_info: EngineInfo) -> EngineInfo:
    """A model that recommends nothing."""
    return engine_info


def test_defaults_of_the_model(info: EngineInfo) -> None:
    assert default_sampling_params(info) == SamplingParams()
    config = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "max_new_tokens": 99,
        "do_sample": True,
        "eos_token_id": [1],
        "bos_token_id": None,
    }
    params = default_sampling_params(msgspec.structs.replace(info, generation_config=config))
    assert params == SamplingParams(
        temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=99
    )


@pytest.mark.parametrize("config", [{}, {"eos_token_id": [1], "temperature": None}])
def test_a_model_without_recommendations_is_sampled_as_local_ones_are(
    info: EngineInfo, config: dict[str, Any]
) -> None:
    params = local_sampling_params(msgspec.structs.replace(info, generation_config=config))
    assert params == SamplingParams(**USUAL, max_tokens=USUAL_LENGTH)


def test_the_models_recommendations_are_not_mixed_with_others(info: EngineInfo) -> None:
    config = {"temperature": 0.6, "max_new_tokens": 99}
    params = local_sampling_params(msgspec.structs.replace(info, generation_config=config))
    assert params == SamplingParams(temperature=0.6, max_tokens=99)
    limited = local_sampling_params(msgspec.structs.replace(info, generation_config={"max_new_tokens": 99}))
    assert limited == SamplingParams(**USUAL, max_tokens=99)
