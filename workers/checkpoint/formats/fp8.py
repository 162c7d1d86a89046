"""Checkpoints in 8-bit floats: `fp8` (AutoFP8, DeepSeek, transformers' fine-grained one) and `fbgemm_fp8`.

A weight is float8 [N, K] (e4m3 or e5m2) times a scale: one for all, for each row, or for each block. No product
of ours multiplies with such numbers, so they are held in 8 bits as integers (`reexpress.py`), on GPUs too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.workers.checkpoint.formats.format import Dtype, Held, Parts, Tensors, Weight, wider

WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
"""Both are multiplied with: "inv" is the inverse of what the weight was multiplied with."""
INPUT_SCALES = ("input_scale", "activation_scale", "input_scale_ub")
STACKED = re.compile(r"experts\.\w+_proj_scale(_inv)?$")


@dataclass(frozen=True)
class Fp8:
    """Matrices of 8-bit floats with scales."""

    name: str
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: the shape of the scales says it."""
    suffixes: frozenset[str] = frozenset({"weight", *WEIGHT_SCALES, *INPUT_SCALES})

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`."""
        from pagewire.workers.checkpoint.formats.reexpress import log_once

        for name in names:
            if STACKED.search(name):
                raise ValueError(
                    f"{name} scales experts that lie in one tensor, which is not served in 8-bit floats; "
                    "a checkpoint that holds each expert apart is"
                )
            if name.rpartition(".")[2] in INPUT_SCALES:
                log_once(
                    "scales of inputs",
                    "the checkpoint's scales of activations are not needed: each row of activations gets its own",
                )

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`."""
        shape = tensors["weight"].shape
        return shape, wider(shape[-1])

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`."""
        from pagewire.workers.checkpoint.formats.reexpress import fp8_weight

        scales = next((tensors[suffix] for suffix in WEIGHT_SCALES if suffix in tensors), None)
        if scales is None:
            raise ValueError(f"it has none of {', '.join(WEIGHT_SCALES)}")
        return fp8_weight(tensors["weight"], scales, dtype, self.block)


def of(config: Mapping[str, Any]) -> Fp8:
    """The format of a `quantization_config` of method `fp8` or `fbgemm_fp8`.

    Raises:
        ValueError: it asks for what is not served.
    """
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise ValueError(f"activation_scheme {scheme!r} of 8-bit floats is not known: dynamic and static are")
    if config.get("expert_dtype", "fp8") != "fp8":
        raise ValueError(f"experts of {config['expert_dtype']!r} beside 8-bit floats are not served")
    size = config.get("weight_block_size")
    return Fp8(str(config["quant_method"]), None if size is None else (int(size[0]), int(size[1])))
