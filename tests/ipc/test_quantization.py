"""Names of quantisations, and whether they agree with a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.quantization import (
    FAMILIES,
    NAMES,
    ONLINE,
    method_of,
    resolve_quantization,
    settings_of,
)


def settings(method: str | None) -> dict[str, Any] | None:
    return None if method is None else {"quant_method": method}


@pytest.mark.parametrize(
    ("name", "method", "resolved"),
    [
        (None, None, None),
        (None, "awq", "awq"),
        (None, "GPTQ", "gptq"),
        ("AWQ", "awq", "awq"),
        ("awq_marlin", "awq", "awq"),
        ("awq", "awq_marlin", "awq_marlin"),
        ("modelopt_fp4", "modelopt", "modelopt"),
        ("gptq", "marlin", "marlin"),
        ("compressed_tensors", "compressed-tensors", "compressed-tensors"),
        ("compressed-tensors", "compressed_tensors", "compressed-tensors"),
        ("bitsandbytes", "bitsandbytes", "bitsandbytes"),
        ("gguf", "gguf", "gguf"),
        ("fp8", "fp8", "fp8"),
        ("dequantize", "gguf", "dequantize"),
        ("Dequantize", "awq", "dequantize"),
        *((name, None, name) for name in ONLINE),
    ],
)
def test_names_that_agree(name: str | None, method: str | None, resolved: str | None) -> None:
    assert resolve_quantization(name, "auto", settings(method)) == resolved


@pytest.mark.parametrize(
    ("name", "method", "words"),
    [
        ("awq", None, "'awq', but the checkpoint is not quantised; .* one of fp8, int8, int6, int4"),
        ("awq", "gptq", "'awq', but the checkpoint is quantised with 'gptq'; leave quantization out"),
        ("dequantize", None, "'dequantize', but the checkpoint is not quantised; leave it out"),
        ("int8", "awq", "'int8', but the checkpoint is quantised with 'awq'"),
        ("fp8", "fbgemm_fp8", "'fp8', but the checkpoint is quantised with 'fbgemm_fp8'"),
        ("marlin", "awq", "'marlin', but the checkpoint is quantised with 'awq'"),
        (None, "quanto", "quantised with 'quanto' are not served; those of aqlm, auto-round, awq"),
        (None, "None", "quantised with 'None' are not served"),
        ("GPTQ_marlin_24", "gptq", "'gptq_marlin_24' is not supported: .*'compressed-tensors'"),
        ("deepspeedfp", None, "'deepspeedfp' is not supported: .*'fp8' quantises weights"),
        ("awk", None, "unknown quantization 'awk'; those known are aqlm, auto-round, awq"),
    ],
)
def test_names_that_do_not_agree(name: str | None, method: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_quantization(name, "auto", settings(method))


def test_load_formats_that_name_a_quantisation() -> None:
    assert resolve_quantization(None, "bitsandbytes", None) == "bitsandbytes"
    assert resolve_quantization("bitsandbytes", "bitsandbytes", settings("bitsandbytes")) == "bitsandbytes"
    assert resolve_quantization(None, "gguf", settings("gguf")) == "gguf"
    assert resolve_quantization("dequantize", "gguf", settings("gguf")) == "dequantize"
    for name, load_format, method in (
        ("awq", "bitsandbytes", "awq"),
        (None, "bitsandbytes", "awq"),
        (None, "gguf", None),
        ("int8", "gguf", "gguf"),
    ):
        with pytest.raises(ValueError, match=r"does not agree|but the checkpoint is"):
            resolve_quantization(name, load_format, settings(method))


def test_the_option_takes_every_name_and_refuses_others_with_a_reason() -> None:
    for name in (*NAMES, "AWQ", None):
        EngineArgs(quantization=name).check()
    with pytest.raises(TypeError, match="quantization"):
        EngineArgs.from_kwargs({"quantization": 8})
    assert set(FAMILIES.values()) <= set(FAMILIES)


def test_what_a_checkpoint_says() -> None:
    assert settings_of("/models/a", {}) is None
    assert settings_of("/models/a", {"quantization_config": None}) is None
    assert method_of(settings_of("/models/a", {"quantization_config": {"quant_method": "awq"}})) == "awq"
    assert method_of(settings_of("/models/a.gguf", {})) == "gguf"
