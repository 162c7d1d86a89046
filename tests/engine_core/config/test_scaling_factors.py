"""Files of scaling factors for the KV cache, and the options that go with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.config.scaling_factors import read_scaling_factors
from pagewire.ipc.options.engine_args import EngineArgs

MODEL: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2}


def content(**changes: Any) -> dict[str, Any]:
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.25, "1": 0.5}}} | changes
    return {"model_type": "llama", "kv_cache": cache}


def write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_factor_for_each_layer(tmp_path: Path) -> None:
    path = write(tmp_path / "scales.json", content())
    assert read_scaling_factors(path, MODEL) == [0.25, 0.5]
    nested = {"model_type": "outer", "text_config": MODEL}
    assert read_scaling_factors(path, nested) == [0.25, 0.5]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("[1, 2]", "cannot read"),
        ('{"kv_cache": {"dtype": "float8_e4m3fn"}}', r"cannot read .*scaling_factor"),
        (content(scaling_factor={"0": {"0": "wide", "1": 1.0}}), "cannot read"),
        (content() | {"model_type": "opt"}, "models of type 'opt', not 'llama'"),
        (content(dtype="float8_e5m2"), "'float8_e5m2', not 'float8_e4m3fn'"),
        (content(scaling_factor={"0": {"0": 1.0, "1": 1.0}, "1": {"0": 1.0, "1": 1.0}}), r"ranks \[0, 1\]"),
        (content(scaling_factor={"0": {"1": 1.0}}), "layers 1 to 1, 1 of them; the model has 2"),
        (content(scaling_factor={"0": {}}), "layers none; the model has 2"),
        (content(scaling_factor={"0": {"0": 1.0, "1": 0.0}}), "the factor of layer 1 is 0.0"),
        (content(scaling_factor={"0": {"0": -2.0, "1": 1.0}}), "the factor of layer 0 is -2.0"),
        (
            '{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 1e999, "1": 1}}}}',
            r"layer 0|read",
        ),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_scaling_factors(write(tmp_path / "scales.json", data), MODEL)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*scales\.json"):
        read_scaling_factors(tmp_path / "scales.json", MODEL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a KV cache of auto takes no scaling factors, since its elements are the model's"),
        ({"kv_cache_dtype": "int8"}, "a scale for each token and head; kv_cache_dtype='fp8' takes them"),
        ({"kv_cache_dtype": "int4"}, "since it has scales for each token and head"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "of fp8_e5m2 takes no scaling factors, since its range"),
        ({"kv_cache_dtype": "fp8", "device": "cpu"}, "which GPUs have and CPUs do not"),
    ],
)
def test_caches_that_take_no_factors(options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineArgs.from_kwargs(options | {"quantization_param_path": "scales.json"})


def test_the_worker_gets_the_factors(tmp_path: Path) -> None:
    write(tmp_path / "config.json", MODEL)
    write(tmp_path / "model.safetensors", "")
    path = write(tmp_path / "scales.json", content())
    options = {"model": str(tmp_path), "kv_cache_dtype": "fp8", "quantization_param_path": str(path)}
    config = EngineConfig.resolve(EngineArgs.from_kwargs(options)).worker_config()
    assert (config.kv_cache_dtype, config.kv_scales) == ("fp8", [0.25, 0.5])
    write(path, content(scaling_factor={"0": {"0": 1.0}}))
    with pytest.raises(ValueError, match="the model has 2 layers"):
        EngineConfig.resolve(EngineArgs.from_kwargs(options))
