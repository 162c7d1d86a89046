"""Checkpoints of compressed-tensors: integers of 1 to 8 bits, packed or not, and floats of 8 bits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.integers import SCALE_DTYPES
from pagewire.kernels.weight import Weight, dense_weight
from pagewire.workers.errors import LoadError
from pagewire.workers.model.formats.checks import check_divides, check_shape, need, parts_by_module
from pagewire.workers.model.formats.config_groups import ConfigGroups, WeightSettings
from pagewire.workers.model.formats.fp8 import FLOAT8, fp8_weight
from pagewire.workers.model.formats.grouped import GroupedIntegers, group_index
from pagewire.workers.model.formats.packing import unpacked

logger = logging.getLogger("pagewire.worker")

ACTIVATIONS = frozenset({"input_scale", "input_zero_point", "output_scale", "output_zero_point"})
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

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """See `Format.shape`."""
        if "weight_packed" in tensors:
            return _packed_shape(name, tensors, self._groups.settings(name))
        values = need(name, tensors, "weight", torch.int8, *FLOAT8, *SCALE_DTYPES)
        num_out, num_in = values.shape
        check_divides(name, "columns", num_in, 1)
        if values.dtype not in SCALE_DTYPES:
            settings = self._groups.settings(name)
            if values.dtype.is_floating_point != (settings.kind == "float"):
                raise LoadError(
                    f"{name}.weight is of {values.dtype}, and quantization_config says {settings.kind}"
                )
            _scales(name, tensors, settings, (num_out, num_in))
        return num_out, num_in

    def weight(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        """See `Format.weight`."""
        num_out, num_in = self.shape(name, tensors)
        values = tensors.get("weight")
        if values is not None and values.dtype in SCALE_DTYPES:
            # Saved without being compressed, or a module of which only outputs have scales.
            return dense_weight(values, dtype)
        settings = self._groups.settings(name)
        if values is not None and settings.kind == "float":
            block = (settings.block_rows, settings.group) if settings.strategy == "block" else None
            return fp8_weight(values, tensors["weight_scale"], dtype, block)
        scales = _scales(name, tensors, settings, (num_out, num_in))
        zeros = _zeros(name, tensors, settings, (num_out, num_in))
        if values is None:
            codes = _packed_codes(name, tensors, settings, (num_out, num_in))
        else:
            codes = _unsigned(name, "weight", values, settings.bits)
        index = group_index(name, tensors, "weight_g_idx", (num_in, scales.shape[1]))
        group = settings.group or num_in
        integers = GroupedIntegers(
            f"{name}.weight_scale", settings.bits, num_in, codes, scales, zeros, group, index
        )
        return integers.weight(dtype)


def _packed_shape(name: str, tensors: Mapping[str, Tensor], settings: WeightSettings) -> tuple[int, int]:
    words = need(name, tensors, "weight_packed", torch.int32)
    if settings.kind == "float":
        raise LoadError(f"{name}.weight_packed holds floats by quantization_config, which is not served")
    num_out, num_in = words.shape[0], words.shape[1] * 32 // settings.bits
    check_divides(name, "packed columns", num_in, 1)
    if settings.strategy == "group":
        # The last word of a row may have room for more columns than there are.
        num_in = min(num_in, need(name, tensors, "weight_scale", *SCALE_DTYPES).shape[1] * settings.group)
        check_shape(name, "weight_packed", words, (num_out, -(-num_in * settings.bits // 32)))
    _scales(name, tensors, settings, (num_out, num_in))
    if (size := tensors.get("weight_shape")) is not None:
        check_shape(name, "weight_shape", size, (2,))
    return num_out, num_in


def _packed_codes(
    name: str, tensors: Mapping[str, Tensor], settings: WeightSettings, shape: tuple[int, int]
) -> Tensor:
    """The integers of a packed matrix; those of 4 bits are in pairs, without a copy, if they fill their words."""
    size, words = tensors.get("weight_shape"), tensors["weight_packed"]
    if size is not None and tuple(size.tolist()) != shape:
        raise LoadError(
            f"{name}.weight_shape is {size.tolist()}, and the other tensors are of a matrix {shape}"
        )
    if settings.bits == 4 and words.shape[1] * 8 == shape[1]:
        return words.contiguous().view(torch.uint8)
    return unpacked(words, settings.bits)[:, : shape[1]]


def _scales(
    name: str, tensors: Mapping[str, Tensor], settings: WeightSettings, shape: tuple[int, int]
) -> Tensor:
    """The scales [N, G]; those of a tensor or of blocks for each row."""
    scales = tensors.get("weight_scale")
    if scales is None or scales.dtype not in SCALE_DTYPES:
        what = "missing" if scales is None else f"of {scales.dtype}"
        raise LoadError(f"{name}.weight_scale must be of float16, bfloat16 or float32; it is {what}")
    return _for_each_row(name, "weight_scale", scales, settings, shape)


def _zeros(
    name: str, tensors: Mapping[str, Tensor], settings: WeightSettings, shape: tuple[int, int]
) -> Tensor | None:
    """The zeros [N, G] of the unsigned integers; None if they are symmetric."""
    middle, stored = 2 ** (settings.bits - 1), tensors.get("weight_zero_point")
    if stored is None:
        if settings.symmetric:
            return None
        raise LoadError(f"{name}.weight_zero_point is missing")
    if stored.dtype == torch.int32:
        num_groups = -(-shape[1] // (settings.group or shape[1]))
        check_shape(name, "weight_zero_point", stored, (-(-shape[0] * settings.bits // 32), num_groups))
        zeros = unpacked(stored.T, settings.bits)[:, : shape[0]].T
    elif stored.dtype == torch.int8:
        signed = _for_each_row(name, "weight_zero_point", stored, settings, shape)
        zeros = _unsigned(name, "weight_zero_point", signed, settings.bits)
    else:
        raise LoadError(f"{name}.weight_zero_point must be int8 or int32, not {stored.dtype}")
    if not settings.symmetric:
        return zeros
    if (zeros != middle).any():
        raise LoadError(
            f"{name}.weight_zero_point is not 0, although quantization_config says that it is symmetric"
        )
    return None


def _for_each_row(
    name: str, suffix: str, values: Tensor, settings: WeightSettings, shape: tuple[int, int]
) -> Tensor:
    """Values of a tensor, of rows, groups or blocks, for the groups of each row [N, G]."""
    num_out, num_in = shape
    if settings.strategy == "tensor":
        if values.numel() != 1:
            raise LoadError(
                f"{name}.{suffix} must be a single number, not of the shape {tuple(values.shape)}"
            )
        return values.reshape(1, 1).expand(num_out, 1)
    if settings.strategy == "channel":
        values = values.reshape(-1, 1) if values.dim() == 1 else values
        check_shape(name, suffix, values, (num_out, 1))
        return values
    num_groups = -(-num_in // settings.group)
    if settings.strategy == "group":
        check_shape(name, suffix, values, (num_out, num_groups))
        return values
    check_shape(name, suffix, values, (-(-num_out // settings.block_rows), num_groups))
    repeated: Tensor = values.repeat_interleave(settings.block_rows, dim=0)
    return repeated[:num_out]


def _unsigned(name: str, suffix: str, values: Tensor, bits: int) -> Tensor:
    """Signed integers of some bits, int8, as unsigned ones, uint8.

    Raises:
        LoadError: some need more bits.
    """
    if bits == 8:
        return values.view(torch.uint8) ^ 128
    low, high = int(values.min()), int(values.max())
    middle = 2 ** (bits - 1)
    if low < -middle or high >= middle:
        raise LoadError(f"{name}.{suffix} holds integers from {low} to {high}, which are no {bits} bits")
    unsigned: Tensor = values + middle
    return unsigned.to(torch.uint8)
