"""Checkpoints of torchao in safetensors files: the parts of its tensors lie there as tensors of their own.

Which class of tensor it was is clear from the dtypes of the parts. What the checkpoint says of activations is only
whether they have 8 bits: each row of activations gets its own scale while it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.workers.checkpoint.formats.checks import (
    SCALE_DTYPES,
    check_divides,
    check_shape,
    need,
    parts_by_module,
)
from pagewire.workers.checkpoint.formats.format import (
    FLOATS_OF_8_BITS,
    Dtype,
    Held,
    Parts,
    ScaledFloat8,
    Tensor,
    Tensors,
    Weight,
    described,
    grouped,
    wider,
)
from pagewire.workers.errors import LoadError

PREFIX = "._weight_"
VALUES, SCALE, ZERO = f"{PREFIX}qdata", f"{PREFIX}scale", f"{PREFIX}zero_point"
REFUSED = {
    "scale_and_zero": "int4 in the order of a GPU's tiles is not served, but int4_packing_format='plain' is",
    "per_tensor_scale": "NVFP4 of torchao is not served, but that of ModelOpt and compressed-tensors is",
    "act_pre_scale": "it multiplies activations, which is not served; quantise without AWQ or SmoothQuant",
}
"""Parts of tensors that are not served, and why."""
ROUNDING = ("Int8DynamicActivationInt8WeightConfig", "Float8DynamicActivationFloat8WeightConfig")
"""torchao's classes for weights and activations in 8 bits."""
ACTIVATIONS = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")


@dataclass(frozen=True)
class Torchao:
    """Matrices as torchao's classes of tensors are saved.

    - Int4Tensor: qdata int8 [N, K / 2], two signed integers in a byte, scale and zero_point floats [G, N]; a
      zero is added to the product of integer and scale
    - Int8Tensor, IntxUnpackedToInt8Tensor: qdata int8 [N, K], scale [N, G] or [1, 1], perhaps zero_point like
      scale, which is subtracted from the integers
    - Float8Tensor: qdata float8 [N, K], scale [N, 1], [1, 1] or of blocks
    """

    name: str = "torchao"
    suffixes: frozenset[str] = frozenset(
        {VALUES, SCALE, ZERO, *(f"{PREFIX}{part}" for part in (*REFUSED, *ACTIVATIONS))}
    )
    rounds_rows: bool = False
    """Activations have 8 bits, too."""

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`."""
        for module, parts in parts_by_module(names, {f"_weight_{part}" for part in REFUSED}).items():
            raise LoadError(f"{module}: {REFUSED[min(parts).removeprefix('_weight_')]}")

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`."""
        values = need(name, tensors, VALUES, "I8", "U8", *FLOATS_OF_8_BITS)
        scales = need(name, tensors, SCALE, *SCALE_DTYPES)
        rows, columns = values.shape
        if values.dtype in FLOATS_OF_8_BITS:
            return (rows, columns), wider(columns)
        zeros = tensors.get(ZERO)
        if zeros is not None:
            check_shape(name, ZERO, zeros, scales.shape)
        if _are_pairs(tensors):
            columns, groups, bits = 2 * columns, max(1, scales.shape[0]), 4
            check_shape(name, SCALE, scales, (groups, rows))
        else:
            groups, bits = max(1, scales.shape[1]), 8
            check_shape(name, SCALE, scales, (1 if scales.shape[0] == groups == 1 else rows, groups))
        check_divides(name, "columns", columns, groups)
        return (rows, columns), grouped(bits, columns, columns // groups, scales, zeros is not None)

    def floats(self, name: str, tensors: Tensors) -> ScaledFloat8 | None:
        """See `FloatFormat.floats`."""
        self.stored(name, parts := described(tensors))
        if parts[VALUES].dtype not in FLOATS_OF_8_BITS:
            return None
        return ScaledFloat8(tensors[VALUES], tensors[SCALE], None, self.rounds_rows)

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`."""
        import torch

        from pagewire.kernels.data.joining import with_rounded_rows
        from pagewire.workers.checkpoint.formats.grouped import GroupedIntegers
        from pagewire.workers.checkpoint.formats.reexpress import FLOAT8, fp8_weight

        parts = described(tensors)
        (rows, columns), _ = self.stored(name, parts)
        values, scales, zeros = tensors[VALUES], tensors[SCALE], tensors.get(ZERO)
        if values.dtype in FLOAT8:
            return fp8_weight(values, scales, dtype)
        codes, where = values.contiguous().view(torch.uint8), f"{name}{SCALE}"
        if _are_pairs(parts):
            assert zeros is not None  # `_are_pairs` has looked at them
            offsets, codes, group = zeros.T, codes ^ 0x88, columns // len(scales)
            integers = GroupedIntegers(where, 4, columns, codes, scales.T, None, group, offsets=offsets)
        else:
            group = columns // scales.shape[1]
            shifted = None if zeros is None else _for_rows(zeros.float() + 128, rows)
            integers = GroupedIntegers(
                where, 8, columns, codes ^ 0x80, _for_rows(scales, rows), shifted, group
            )
        return with_rounded_rows(integers.weight(dtype), self.rounds_rows)


def _are_pairs(tensors: Parts) -> bool:
    """True for two integers in a byte: they alone have zeros that are floats for the groups of all rows."""
    zeros = tensors.get(ZERO)
    return zeros is not None and zeros.dtype in SCALE_DTYPES and zeros.shape[-1] == tensors[VALUES].shape[0]


def _for_rows(values: Tensor, rows: int) -> Tensor:
    """Values [N, G], or [1, 1] for all rows, for each row."""
    return values.expand(rows, -1) if len(values) == 1 else values


def of(config: Mapping[str, Any]) -> Torchao:
    """The format of a `quantization_config` of method `torchao`; the tensors say what their numbers are.

    Where all modules have one configuration, its class says whether activations are quantised.
    """
    kinds = config.get("quant_type")
    default = kinds.get("default") if isinstance(kinds, Mapping) and len(kinds) == 1 else None
    name = default.get("_type") if isinstance(default, Mapping) else None
    return Torchao(rounds_rows=name in ROUNDING)
