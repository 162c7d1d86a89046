"""The names of quantisations, and whether one agrees with a checkpoint.

A checkpoint says itself how it is quantised. A name that is given must be of the same family. For a checkpoint of
plain numbers, some names say how its weights are quantised while they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

from pagewire.ipc.compatibility import refuse_value
from pagewire.ipc.quoting import quoted

FAMILIES = {
    "aqlm": "aqlm",
    "auto-round": "auto-round",
    "awq": "awq",
    "awq_marlin": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "fbgemm_fp8",
    "fp8": "fp8",
    "gguf": "gguf",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "hqq": "hqq",
    "marlin": "gptq",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    "quark": "quark",
    "squeezellm": "squeezellm",
    "torchao": "torchao",
}
"""Names of quantised checkpoints to the format that they are of. Marlin is a layout of kernels for some of them."""
ONLINE = ("fp8", "int8", "int6", "int4", "int4_int8", "bitsandbytes", "experts_int8")
"""Names of quantisations that are applied to a checkpoint of plain numbers while it is loaded."""
DEQUANTIZE = "dequantize"
"""Name for a quantised checkpoint whose weights are plain numbers once they are loaded."""
NAMES = (*FAMILIES, *(name for name in ONLINE if name not in FAMILIES), DEQUANTIZE)
GGUF: Mapping[str, Any] = {"quant_method": "gguf"}
QUANTISED_LOAD_FORMATS = ("bitsandbytes", "gguf")
"""Load formats that say at once how the checkpoint is quantised."""


def quantization_name(text: str) -> str:
    """A name of a quantisation in the spelling of `NAMES`: case and underscores are free.

    Raises:
        ValueError: nothing serves it; the text says what to do.
    """
    name = text.lower()
    refuse_value("quantization", name)
    if name not in NAMES and (dashed := name.replace("_", "-")) in NAMES:
        name = dashed
    if name not in NAMES:
        raise ValueError(f"unknown quantization {quoted(text)}; those known are {', '.join(NAMES)}")
    return name


def settings_of(path: str | PathLike[str], config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How a checkpoint says that it is quantised: its `quantization_config`; None for plain numbers.

    path: of the model's folder or GGUF file, which is always quantised. config: the content of config.json.
    """
    return GGUF if fspath(path).endswith(".gguf") else config.get("quantization_config")


def method_of(settings: Mapping[str, Any] | None) -> str | None:
    """The format of a checkpoint by its `quantization_config`, a key of `FAMILIES`; None without one.

    Raises:
        ValueError: it names a method that is not served, or none.
    """
    if settings is None:
        return None
    method = str(settings.get("quant_method")).lower()
    method = method if method in FAMILIES else method.replace("_", "-")
    if method not in FAMILIES:
        raise ValueError(
            f"checkpoints quantised with {quoted(settings.get('quant_method'))} are not served; "
            f"those of {', '.join(dict.fromkeys(FAMILIES.values()))} are"
        )
    return method


def resolve_quantization(
    quantization: str | None, load_format: str, settings: Mapping[str, Any] | None
) -> str | None:
    """The quantisation that a model is loaded with, or `DEQUANTIZE`; None for plain numbers.

    quantization: what the options name, or None. settings: of the checkpoint, as `settings_of` gives them.

    Raises:
        ValueError: the name does not agree with the checkpoint; or nothing serves it.
    """
    if load_format in QUANTISED_LOAD_FORMATS and quantization is None:
        quantization = load_format
    method = method_of(settings)
    if quantization is None:
        return method
    name = quantization_name(quantization)
    if name == DEQUANTIZE and method is not None:
        return name
    if load_format in QUANTISED_LOAD_FORMATS and FAMILIES.get(name) != load_format:
        raise ValueError(f"load_format={load_format!r} does not agree with quantization={quantization!r}")
    if method is None:
        if name not in ONLINE:
            raise ValueError(
                f"quantization={quantization!r}, but the checkpoint is not quantised; leave it out, or "
                f"quantise while loading with one of {', '.join(ONLINE)}"
            )
        return name
    if FAMILIES.get(name) != FAMILIES[method]:
        raise ValueError(
            f"quantization={quantization!r}, but the checkpoint is quantised with {method!r}; leave "
            "quantization out, and the checkpoint's own is taken"
        )
    return method
