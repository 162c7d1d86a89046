"""Checkpoints of compressed-tensors: integers of 1 to 8 bits, packed or not, and floats of 8 and 4 bits."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.workers.checkpoint.formats.checks import (
    SCALE_DTYPES,
    check_divides,
    check_shape,
    need,
    parts_by_module,
)
from pagewire.workers.checkpoint.formats.config_groups import ConfigGroups, WeightSettings
from pagewire.workers.checkpoint.formats.format import (
    FLOATS_OF_8_BITS,
    POWERS_OF_TWO,
    Dtype,
    Held,
    Parts,
    ScaledFloat8,
    Tensor,
    Tensors,
    Weight,
    described,
    float_format,
    grouped,
    wider,
)
from pagewire.workers.checkpoint.headers import DTYPES, FLOATS, TensorHeader
from pagewire.workers.errors import LoadError

logger = logging.getLogger("pagewire.worker")

ACTIVATIONS = frozenset(
    {"input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale"}
)
"""What belongs to activations is not read: each row of activations gets its own scale while it is computed."""


def of(config: Mapping[str, Any]) -> CompressedTensorsFormat:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        LoadError: it is of a kind that is not served.
    """
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise LoadError(
            f"compressed-tensors with sparsity_config.format={sparsity['format']!r} is not served; 'dense' is"
        )
    if config.get("transform_config"):
        raise LoadError(
            "compressed-tensors with a transform_config is not served: activations would be rotated, too"
        )
    groups = ConfigGroups.of(config)
    if groups.static:
        logger.info(
            "compressed-tensors: activations are quantised row by row, so their static scales are not used"
        )
    if config.get("kv_cache_scheme"):
        logger.info(
            "compressed-tensors: kv_cache_scheme is not used; kv_cache_dtype says how the KV cache is held"
        )
    return CompressedTensorsFormat(groups)


class CompressedTensorsFormat:
    """How matrices lie in a compressed-tensors checkpoint, where b is the number of bits.

    - packed: weight_packed int32 [N, K * b / 32], weight_scale, weight_shape; perhaps weight_zero_point int32
      [N * b / 32, G] and weight_g_idx [K]
    - plain: weight int8 or float8 [N, K], weight_scale, perhaps weight_zero_point int8 like weight_scale
    - 4-bit floats: weight_packed uint8 [N, K / 2], weight_scale [N, G], and weight_global_scale if that is float8

    Scales are [1], [N, 1], [N, G] or, for blocks, [N / rows, K / columns].
    """

    name = "compressed-tensors"

    def __init__(self, groups: ConfigGroups) -> None:
        self._groups = groups
        parts = {
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "weight_global_scale",
        }
        self.suffixes = frozenset(parts) | ACTIVATIONS

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`."""
        names = list(names)
        for module, has in parts_by_module(names, self.suffixes - ACTIVATIONS).items():
            if has == {"weight"}:
                continue
            if not has & {"weight", "weight_packed"} or "weight_scale" not in has:
                raise LoadError(f"{module} has {', '.join(sorted(has))}, but no weight or no weight_scale")
            self._groups.settings(module)

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`."""
        if "weight_packed" in tensors:
            settings = self._groups.settings(name)
            if settings.kind == "float":
                return float_format(name, tensors["weight_packed"], tensors["weight_scale"])
            shape = _packed_shape(name, tensors, settings)
        else:
            values = need(name, tensors, "weight", "I8", *FLOATS_OF_8_BITS, *SCALE_DTYPES)
            shape = values.shape[0], values.shape[1]
            check_divides(name, "columns", shape[1], 1)
            if values.dtype in SCALE_DTYPES:
                return shape, NumberFormat(FLOATS[values.dtype])
            settings = self._groups.settings(name)
            if (values.dtype in FLOATS_OF_8_BITS) != (settings.kind == "float"):
                raise LoadError(
                    f"{name}.weight is of torch.{DTYPES[values.dtype]}, and quantization_config says "
                    f"{settings.kind}"
                )
        scales = _check_scales(name, tensors, settings, shape)
        if settings.kind == "float":
            return shape, wider(shape[1])
        group = settings.group or shape[1]
        return shape, grouped(settings.bits, shape[1], group, scales, not settings.symmetric)

    def floats(self, name: str, tensors: Tensors) -> ScaledFloat8 | None:
        """See `FloatFormat.floats`."""
        self.stored(name, parts := described(tensors))
        if "weight" not in parts or parts["weight"].dtype not in FLOATS_OF_8_BITS:
            return None
        settings = self._groups.settings(name)
        block = (settings.block_rows or 1, settings.group) if settings.group else None
        return ScaledFloat8(tensors["weight"], tensors["weight_scale"], block, settings.rounds_rows)

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`."""
        from pagewire.kernels.data.joining import with_rounded_rows
        from pagewire.kernels.data.weight import dense_weight
        from pagewire.workers.checkpoint.formats.grouped import GroupedIntegers, group_index
        from pagewire.workers.checkpoint.formats.tables import float_weight

        (num_out, num_in), held = self.stored(name, described(tensors))
        values = tensors.get("weight")
        if values is not None and held.is_float:
            # Saved without being compressed, or a module of which only outputs have scales.
            return dense_weight(values, dtype)
        settings = self._groups.settings(name)
        if settings.kind == "float":
            block = (settings.block_rows or 1, settings.group) if settings.group else None
            divisor = tensors.get("weight_global_scale")
            factor = None if divisor is None else 1 / divisor.float()
            floats = tensors["weight_packed"] if values is None else values
            return float_weight(floats, tensors["weight_scale"], dtype, block, factor)
        scales = _for_each_row(tensors["weight_scale"], settings, num_out)
        zeros = _zeros(name, tensors.get("weight_zero_point"), settings, num_out)
        if values is None:
            codes = _packed_codes(name, tensors, settings, (num_out, num_in))
        else:
            codes = _unsigned(name, "weight", values, settings.bits)
        index = group_index(name, tensors, "weight_g_idx", (num_in, scales.shape[1]))
        group = settings.group or num_in
        integers = GroupedIntegers(
            f"{name}.weight_scale", settings.bits, num_in, codes, scales, zeros, group, index
        )
        return with_rounded_rows(integers.weight(dtype), settings.rounds_rows)


def _packed_shape(
    name: str, tensors: Mapping[str, TensorHeader], settings: WeightSettings
) -> tuple[int, int]:
    words = need(name, tensors, "weight_packed", "I32")
    num_out, num_in = words.shape[0], words.shape[1] * 32 // settings.bits
    check_divides(name, "packed columns", num_in, 1)
    if settings.strategy == "group":
        # The last word of a row may have room for more columns than there are.
        num_in = min(num_in, need(name, tensors, "weight_scale", *SCALE_DTYPES).shape[1] * settings.group)
        check_shape(name, "weight_packed", words, (num_out, -(-num_in * settings.bits // 32)))
    if (size := tensors.get("weight_shape")) is not None:
        check_shape(name, "weight_shape", size, (2,))
    return num_out, num_in


def _check_scales(
    name: str, tensors: Parts, settings: WeightSettings, shape: tuple[int, int]
) -> TensorHeader:
    """The header of the scales, once they and the zeros are known to be of the right shapes and dtypes."""
    scales, zeros = tensors.get("weight_scale"), tensors.get("weight_zero_point")
    powers = POWERS_OF_TWO if settings.kind == "float" else ()
    if scales is None or scales.dtype not in (*SCALE_DTYPES, *powers):
        what = "missing" if scales is None else f"of {scales.dtype}"
        raise LoadError(f"{name}.weight_scale must be of float16, bfloat16 or float32; it is {what}")
    _check_rows(name, scales, settings, shape)
    if zeros is None and not settings.symmetric:
        raise LoadError(f"{name}.weight_zero_point is missing")
    if zeros is not None and settings.kind == "int":
        if zeros.dtype not in ("I8", "I32"):
            raise LoadError(f"{name}.weight_zero_point must be int8 or int32, not {zeros.dtype}")
        if zeros.dtype == "I8":
            _check_rows(name, zeros, settings, shape)
        else:
            num_groups = -(-shape[1] // (settings.group or shape[1]))
            packed = -(-shape[0] * settings.bits // 32)
            check_shape(name, "weight_zero_point", zeros, (packed, num_groups))
    return scales


def _check_rows(name: str, values: TensorHeader, settings: WeightSettings, shape: tuple[int, int]) -> None:
    """Raise LoadError if there is not a value for the tensor, for each row, group or block."""
    suffix, num_out = values.name.rpartition(".")[2], shape[0]
    if settings.strategy == "tensor":
        if math.prod(values.shape) != 1:
            raise LoadError(f"{name}.{suffix} must be a single number, not of the shape {values.shape}")
    elif settings.strategy == "channel":
        check_shape(name, suffix, values, (num_out,) if len(values.shape) == 1 else (num_out, 1))
    else:
        rows = -(-num_out // (settings.block_rows or 1))
        check_shape(name, suffix, values, (rows, -(-shape[1] // settings.group)))


def _packed_codes(
    name: str, tensors: Mapping[str, Tensor], settings: WeightSettings, shape: tuple[int, int]
) -> Tensor:
    """The integers of a packed matrix; those of 4 bits are in pairs, without a copy, if they fill their words."""
    import torch

    from pagewire.workers.checkpoint.formats.packing import unpacked

    size, words = tensors.get("weight_shape"), tensors["weight_packed"]
    if size is not None and tuple(size.tolist()) != shape:
        raise LoadError(
            f"{name}.weight_shape is {size.tolist()}, and the other tensors are of a matrix {shape}"
        )
    if settings.bits == 4 and words.shape[1] * 8 == shape[1]:
        return words.contiguous().view(torch.uint8)
    return unpacked(words, settings.bits)[:, : shape[1]]


def _zeros(name: str, stored: Tensor | None, settings: WeightSettings, num_out: int) -> Tensor | None:
    """The zeros [N, G] of the unsigned integers; None if they are symmetric."""
    import torch

    from pagewire.workers.checkpoint.formats.packing import unpacked

    if stored is None:
        return None
    if stored.dtype == torch.int32:
        zeros = unpacked(stored.T, settings.bits)[:, :num_out].T
    else:
        signed = _for_each_row(stored, settings, num_out)
        zeros = _unsigned(name, "weight_zero_point", signed, settings.bits)
    if not settings.symmetric:
        return zeros
    if (zeros != 2 ** (settings.bits - 1)).any():
        raise LoadError(
            f"{name}.weight_zero_point is not 0, although quantization_config says that it is symmetric"
        )
    return None


def _for_each_row(values: Tensor, settings: WeightSettings, num_out: int) -> Tensor:
    """Values of a tensor, of rows, groups or blocks, for the groups of each row [N, G]."""
    if settings.strategy == "tensor":
        return values.reshape(1, 1).expand(num_out, 1)
    if settings.strategy == "channel":
        return values.reshape(-1, 1)
    if settings.strategy == "group":
        return values
    repeated: Tensor = values.repeat_interleave(settings.block_rows, dim=0)
    return repeated[:num_out]


def _unsigned(name: str, suffix: str, values: Tensor, bits: int) -> Tensor:
    """Signed integers of some bits, int8, as unsigned ones, uint8.

    Raises:
        LoadError: some need more bits.
    """
    import torch

    if bits == 8:
        return values.view(torch.uint8) ^ 128
    low, high = int(values.min()), int(values.max())
    middle = 2 ** (bits - 1)
    if low < -middle or high >= middle:
        raise LoadError(f"{name}.{suffix} holds integers from {low} to {high}, which are no {bits} bits")
    unsigned: Tensor = values + middle
    return unsigned.to(torch.uint8)
