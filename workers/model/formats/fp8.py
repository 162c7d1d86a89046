"""Checkpoints in 8-bit floats: `fp8` (AutoFP8, DeepSeek, transformers' fine-grained one) and `fbgemm_fp8`.

A weight is float8 [N, K] (e4m3 or e5m2) times a scale: one for all, for each row, or for each block. No product
of ours multiplies with such numbers, so they are held in 8 bits as integers (`reexpress.py`), on GPUs too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.integers import row_blocks
from pagewire.kernels.weight import Weight
from pagewire.workers.model.formats.reexpress import log_once, reexpressed

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
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

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """See `Format.shape`."""
        return tuple(tensors["weight"].shape)

    def weight(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        """See `Format.weight`."""
        scales = next((tensors[suffix] for suffix in WEIGHT_SCALES if suffix in tensors), None)
        if scales is None:
            raise ValueError(f"it has none of {', '.join(WEIGHT_SCALES)}")
        return fp8_weight(tensors["weight"], scales, dtype, self.block)


def fp8_weight(
    values: Tensor, scales: Tensor, dtype: torch.dtype, block: tuple[int, int] | None = None
) -> Weight:
    """A matrix of 8-bit floats, held in 8 bits as integers; the log says what that costs.

    values: float8 [N, K]. scales: what they are multiplied with, for the whole matrix [] or [1], for each row [N]
    or [N, 1], or for each block [N / rows, K / columns], rounded up. dtype: of the product's inputs and outputs.
    block: rows and columns of a block; None: the fewest that fit the scales.

    Raises:
        ValueError: values are of another dtype, scales fit no such shape, or a number is not finite.
    """
    if values.dtype not in FLOAT8 or values.dim() != 2:
        raise ValueError(f"{tuple(values.shape)} of {values.dtype} is no matrix of 8-bit floats")
    blocks = _scaled(values, *_grid(values, scales.float(), block))
    return reexpressed(f"8-bit floats ({str(values.dtype).removeprefix('torch.float8_')})", blocks, dtype)


def _grid(values: Tensor, scales: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, int, int]:
    """Scales as a matrix, and how many rows and columns share one."""
    rows, columns = values.shape
    if scales.numel() == 1:
        return scales.reshape(1, 1), rows, columns
    if scales.numel() == rows and scales.shape[0] == rows:
        return scales.reshape(rows, 1), 1, columns
    if scales.dim() == 2:
        size = block or (-(-rows // scales.shape[0]), -(-columns // scales.shape[1]))
        if tuple(scales.shape) == (-(-rows // size[0]), -(-columns // size[1])):
            return scales, *size
    raise ValueError(
        f"scales {tuple(scales.shape)} do not fit a matrix {tuple(values.shape)}, blocks {block}"
    )


def _scaled(values: Tensor, scales: Tensor, rows: int, columns: int) -> Iterator[Tensor]:
    """Blocks of rows of the dense matrix."""
    for start, stop in row_blocks(*values.shape):
        by_row = scales[torch.arange(start, stop) // rows]
        yield values[start:stop].float() * by_row.repeat_interleave(columns, 1)[:, : values.shape[1]]


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
