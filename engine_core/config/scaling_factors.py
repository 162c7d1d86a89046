"""Scaling factors of a KV cache of 8-bit floats, from a JSON file of a quantiser:

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.023, "1": ...}}}}

For each tensor-parallel rank a number for each layer: what is stored, times this, are the layer's keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pagewire.ipc.files.hub import read_file

DTYPE = "float8_e4m3fn"


class KVCacheFactors(msgspec.Struct):
    """The part of a file about the KV cache."""

    dtype: str
    scaling_factor: dict[int, dict[int, float]]


class FactorsFile(msgspec.Struct):
    """What a file holds."""

    kv_cache: KVCacheFactors
    model_type: str | None = None


def read_scaling_factors(path: Path, model: Mapping[str, Any]) -> list[float]:
    """The factor of each layer of the model with this config.json.

    Raises:
        ValueError: the file cannot be read, is of another form, of another model or KV cache, or of several ranks;
            layers are missing or unknown; a factor is not a number above 0.
    """
    try:
        file = msgspec.json.decode(read_file(path), type=FactorsFile)
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"quantization_param_path: cannot read {path}: {error}") from error
    text = model.get("text_config") or model
    num_layers = next((n for name in ("num_hidden_layers", "n_layer") if (n := text.get(name))), None)
    kinds = {model.get("model_type"), text.get("model_type")}
    if file.model_type is not None and file.model_type not in kinds:
        raise ValueError(f"{path} is for models of type {file.model_type!r}, not {model.get('model_type')!r}")
    if file.kv_cache.dtype != DTYPE:
        raise ValueError(f"{path} is for a KV cache of {file.kv_cache.dtype!r}, not {DTYPE!r}")
    ranks = file.kv_cache.scaling_factor
    if set(ranks) != {0}:
        raise ValueError(f"{path} has factors for ranks {sorted(ranks)}; the only rank is 0")
    factors = ranks[0]
    if num_layers is None or set(factors) != set(range(num_layers)):
        raise ValueError(
            f"{path} has factors for layers {_short(factors)}; the model has {num_layers} layers"
        )
    for layer, factor in factors.items():
        if not 0 < factor < math.inf:
            raise ValueError(f"{path}: the factor of layer {layer} is {factor}, not a number above 0")
    return [factors[layer] for layer in range(num_layers)]


def _short(layers: Mapping[int, float]) -> str:
    return f"{min(layers)} to {max(layers)}, {len(layers)} of them" if layers else "none"
