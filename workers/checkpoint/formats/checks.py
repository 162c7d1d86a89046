"""Checks of a quantised checkpoint: the fields of its `quantization_config`, and the tensors of its modules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pagewire.ipc.quoting import quoted
from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.workers.checkpoint.formats.format import grouped
from pagewire.workers.checkpoint.headers import DTYPES, TensorHeader
from pagewire.workers.errors import LoadError
from pagewire.workers.name_patterns import MatchTime, NamePattern

SCALE_DTYPES = ("F16", "BF16", "F32")
MARLIN_TILE = 16
"""Rows and columns of a tile in the marlin layout."""


def integer_setting(config: Mapping[str, Any], names: Iterable[str], default: int) -> int:
    """The first of these fields that is set.

    Raises:
        LoadError: it is no integer.
    """
    for name in names:
        if (value := config.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise LoadError(f"quantization_config: {name} must be an integer, not {quoted(value)}")
            return value
    return default


def switch(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false.

    Raises:
        LoadError: it is neither.
    """
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise LoadError(f"quantization_config: {name} must be true or false, not {quoted(value)}")
    return value


def pattern(text: str) -> NamePattern:
    """A regular expression of names of modules.

    Raises:
        LoadError: it cannot be compiled.
    """
    each_only = MatchTime(math.inf)  # a name is matched several times while a model is loaded
    return NamePattern(text, "quantization_config", each_only)


def parts_by_module(names: Iterable[str], suffixes: Iterable[str]) -> dict[str, set[str]]:
    """For each module with tensors of such suffixes: which of them it has. names: of tensors."""
    found: dict[str, set[str]] = {}
    wanted = set(suffixes)
    for name in names:
        module, _, suffix = name.rpartition(".")
        if suffix in wanted:
            found.setdefault(module, set()).add(suffix)
    return found


def check_complete(names: Iterable[str], needed: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raise LoadError if a module has some of the needed tensors (or an optional one), and lacks others."""
    needed = set(needed)
    for module, has in parts_by_module(names, needed | set(optional)).items():
        if missing := sorted(needed - has):
            raise LoadError(f"{module} has {_list(has)}, but no {_list(missing)}")


def need(name: str, tensors: Mapping[str, TensorHeader], suffix: str, *dtypes: str) -> TensorHeader:
    """A tensor of a module, a matrix of one of these dtypes.

    Raises:
        LoadError: it is missing, or anything else.
    """
    if (tensor := tensors.get(suffix)) is None:
        raise LoadError(f"{name}.{suffix} is missing")
    if tensor.dtype not in dtypes or len(tensor.shape) != 2:
        kinds = " or ".join(DTYPES[dtype] for dtype in dtypes)
        raise LoadError(f"{name}.{suffix} must be a matrix of {kinds}, not {tensor.shape} of {tensor.dtype}")
    return tensor


def need_scales(
    name: str, tensors: Mapping[str, TensorHeader], suffix: str, shape: tuple[int, int]
) -> TensorHeader:
    """The scales of a module, float16, bfloat16 or float32 of a shape.

    Raises:
        LoadError: they are missing, or anything else.
    """
    scales = need(name, tensors, suffix, *SCALE_DTYPES)
    check_shape(name, suffix, scales, shape)
    return scales


def check_shape(name: str, suffix: str, tensor: TensorHeader, shape: tuple[int, ...]) -> None:
    """Raise LoadError if a tensor of a module is of another shape."""
    if tensor.shape != shape:
        raise LoadError(f"{name}.{suffix} must have the shape {shape}, not {tensor.shape}")


def check_divides(name: str, what: str, size: int, step: int) -> None:
    """Raise LoadError if a size is 0 or no multiple of a step."""
    if size <= 0 or size % step:
        raise LoadError(f"{name} has {size} {what}; they must be a multiple of {step}")


def marlin_shape(
    name: str, tensors: Mapping[str, TensorHeader], words: str, scales: str, group: int
) -> tuple[tuple[int, int], NumberFormat]:
    """The shape [N, K] of a matrix in the marlin layout, and how it is held.

    Args:
        name: of the module.
        words: the suffix of int32 [K / 16, 2 * N].
        scales: the suffix of the scales [G, N].
        group: columns with a scale; -1: all of a row.

    Raises:
        LoadError: the tensors do not fit each other.
    """
    packed = need(name, tensors, words, "I32")
    num_in, num_out = packed.shape[0] * MARLIN_TILE, packed.shape[1] // 2
    check_divides(name, "words in a row", packed.shape[1], 128)
    group = num_in if group == -1 else group
    check_divides(name, "columns", num_in, group)
    found = need_scales(name, tensors, scales, (num_in // group, num_out))
    return (num_out, num_in), grouped(4, num_in, group, found, has_zeros=False)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
