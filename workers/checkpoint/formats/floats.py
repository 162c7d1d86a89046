"""Checkpoints in floats of 8 and 4 bits with scales: FP8 of several tools, NVFP4, MXFP4, MXFP8.

The dtypes of a matrix and its scales say what it is (`float_format`), so one format reads what `fp8`, `fbgemm_fp8`,
`mxfp8`, `modelopt` and `quark` write. Only weights are read in these formats: activations get scales of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.ipc.quoting import quoted
from pagewire.workers.checkpoint.formats.format import (
    FLOATS_OF_8_BITS,
    Dtype,
    Held,
    Parts,
    ScaledFloat8,
    Tensors,
    Weight,
    described,
    float_format,
)

WEIGHTS = ("weight", "weight_packed")
SCALES = ("weight_scale", "weight_scale_inv")
"""Both are multiplied with: "inv" is the inverse of what the weight was multiplied with."""
FACTOR, DIVISOR = "weight_scale_2", "weight_global_scale"
"""What all scales of an NVFP4 matrix are multiplied with, or divided by."""
ACTIVATIONS = (
    *("input_scale", "activation_scale", "input_scale_ub", "input_global_scale", "output_scale"),
    *("input_zero_point", "output_zero_point", "weight_zero_point"),
)
"""Tensors that are not read: scales of activations, and zeros, which floats do not have."""
STACKED = re.compile(r"experts\.\w+_proj(_weight)?_scale(_inv|_2)?$")
CHANGED_INPUTS = "pre_quant_scale"
"""A tensor that activations are multiplied with before a product."""
ALGORITHMS = frozenset(
    {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MXFP8", "MXFP4", "W4A8_MXFP4_FP8"}
    | {"NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MIXED_PRECISION"}
)
"""ModelOpt's names of what is read; its others hold integers, or change activations."""
ROUNDING = frozenset({"FP8", "FP8_PER_CHANNEL_PER_TOKEN"})
"""Those of 8-bit floats with activations in 8-bit floats."""
QUARK_DTYPES = frozenset({"fp8_e4m3", "fp8_e5m2", "fp4"})


@dataclass(frozen=True)
class ScaledFloats:
    """Matrices of 8-bit or 4-bit floats with scales."""

    name: str
    block: tuple[int, int] | None = None
    """Rows and columns of 8-bit floats that share a scale; None: the shape of the scales says it."""
    rounds_rows: bool = False
    """Activations are 8-bit floats, too."""
    suffixes: frozenset[str] = frozenset(
        {*WEIGHTS, *SCALES, *ACTIVATIONS, FACTOR, DIVISOR, CHANGED_INPUTS, "weight_shape"}
    )

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`."""
        from pagewire.workers.checkpoint.formats.reexpress import log_once

        for name in names:
            suffix = name.rpartition(".")[2]
            if STACKED.search(name):
                raise ValueError(
                    f"{name} scales experts that lie in one tensor, which is not served in 8-bit or 4-bit floats; "
                    "a checkpoint that holds each expert apart is"
                )
            if suffix == CHANGED_INPUTS:
                raise ValueError(
                    f"{name} multiplies activations, which is not served; a checkpoint quantised without AWQ or "
                    "SmoothQuant is"
                )
            if suffix in ACTIVATIONS:
                log_once(
                    "scales of inputs",
                    "the checkpoint's scales of activations are not needed: each row of activations gets its own",
                )

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`."""
        return float_format(name, tensors[_one_of(tensors, WEIGHTS)], tensors[_one_of(tensors, SCALES)])

    def floats(self, name: str, tensors: Tensors) -> ScaledFloat8 | None:
        """See `FloatFormat.floats`."""
        self.stored(name, parts := described(tensors))
        if parts[_one_of(tensors, WEIGHTS)].dtype not in FLOATS_OF_8_BITS:
            return None
        values, scales = tensors[_one_of(tensors, WEIGHTS)], tensors[_one_of(tensors, SCALES)]
        return ScaledFloat8(values, scales, self.block, self.rounds_rows)

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`."""
        from pagewire.workers.checkpoint.formats.tables import float_weight

        self.stored(name, described(tensors))
        values, scales = tensors[_one_of(tensors, WEIGHTS)], tensors[_one_of(tensors, SCALES)]
        factor = tensors.get(FACTOR)
        if DIVISOR in tensors:
            factor = 1 / tensors[DIVISOR].float()
        return float_weight(values, scales, dtype, self.block, factor)


def _one_of(tensors: Mapping[str, object], suffixes: tuple[str, ...]) -> str:
    for suffix in suffixes:
        if suffix in tensors:
            return suffix
    raise ValueError(f"it has none of {', '.join(suffixes)}")


def of(config: Mapping[str, Any]) -> ScaledFloats:
    """The format of a `quantization_config` of method `fp8`, `fbgemm_fp8` or `mxfp8`.

    Raises:
        ValueError: it asks for what is not served.
    """
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise ValueError(f"activation_scheme {scheme!r} of 8-bit floats is not known: dynamic and static are")
    if config.get("expert_dtype", "fp8") != "fp8":
        raise ValueError(f"experts of {config['expert_dtype']!r} beside 8-bit floats are not served")
    size = config.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))
    return ScaledFloats(str(config["quant_method"]), block, rounds_rows=True)


def of_modelopt(config: Mapping[str, Any]) -> ScaledFloats:
    """The format of a `quantization_config` of method `modelopt`. Where it names no algorithm, the tensors say it.

    Raises:
        ValueError: the algorithm is not served.
    """
    algorithm = config.get("quant_algo")
    if algorithm is not None and str(algorithm).upper() not in ALGORITHMS:
        raise ValueError(
            f"ModelOpt's quant_algo {quoted(algorithm)} is not served: it holds integers or changes activations; "
            f"{', '.join(sorted(ALGORITHMS))} are, and integers from AWQ, GPTQ and compressed-tensors"
        )
    return ScaledFloats("modelopt", rounds_rows=str(algorithm).upper() in ROUNDING)


def of_quark(config: Mapping[str, Any]) -> ScaledFloats:
    """The format of a `quantization_config` of method `quark`.

    Raises:
        ValueError: some weights are of a dtype that is not served.
    """
    layers = config.get("layer_quant_config") or {}
    rounds_rows = True
    for settings in (config.get("global_quant_config"), *dict(layers).values()):
        weights = settings.get("weight") if isinstance(settings, Mapping) else None
        inputs = settings.get("input_tensors") if isinstance(settings, Mapping) else None
        rounds_rows &= isinstance(inputs, Mapping) and inputs.get("dtype") == "fp8_e4m3"
        for kind in [weights] if isinstance(weights, Mapping) else weights or []:
            if isinstance(kind, Mapping) and kind.get("dtype") not in QUARK_DTYPES:
                raise ValueError(
                    f"Quark's weights of dtype {quoted(kind.get('dtype'))} are not served; "
                    f"{', '.join(sorted(QUARK_DTYPES))} are, and integers from AWQ, GPTQ and compressed-tensors"
                )
    return ScaledFloats("quark", rounds_rows=rounds_rows)
