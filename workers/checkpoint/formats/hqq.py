"""HQQ checkpoints: integers of 1 to 8 bits with floats as zeros, in groups along a row or across rows.

HQQ reshapes a matrix before it makes groups, and packs the rows of what results. Groups along rows of whole columns
(`axis` 1) are held exactly; those across rows (`axis` 0) are quantised again, in 8 bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.ipc.quoting import quoted
from pagewire.workers.checkpoint.formats.checks import SCALE_DTYPES, check_complete
from pagewire.workers.checkpoint.formats.format import (
    Dtype,
    Held,
    Parts,
    Tensor,
    Tensors,
    Weight,
    described,
    grouped,
    wider,
)
from pagewire.workers.errors import LoadError

NEEDED = frozenset({"W_q", "scale", "zero", "shape", "nbits", "axis"})
SETTINGS = frozenset(
    {
        "group_size",
        "packing",
        "unpack_view_dtype",
        "view_as_float",
        "quant_scale",
        "quant_zero",
        "compute_dtype",
    }
    | {"offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero"}
)
"""What is saved beside `NEEDED`; of these, the group size is read."""
NESTED = frozenset({"zero_scale", "meta_scale", "meta_zero"})
BITS = (1, 2, 3, 4, 8)
PER_WORD = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}
"""How many integers a word has: 32 bits of 3-bit integers, and 8 bits of the others."""


@dataclass(frozen=True)
class _Layout:
    """How a matrix was quantised."""

    shape: tuple[int, int]
    bits: int
    group: int
    is_along_rows: bool

    @property
    def packed_shape(self) -> tuple[int, int]:
        """The shape of the integers before they were packed."""
        number, rest = math.prod(self.shape), math.prod(self.shape) // self.group
        return (rest, self.group) if self.is_along_rows else (self.group, number // self.group)


@dataclass(frozen=True)
class HqqFormat:
    """Matrices as `HQQLinear` saves them: integers W_q, scale and zero, and its settings as small tensors."""

    name: str = "hqq"
    suffixes: frozenset[str] = NEEDED | SETTINGS | NESTED

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`."""
        names = list(names)
        for name in names:
            if name.rpartition(".")[2] in NESTED:
                raise LoadError(
                    f"{name}: HQQ with quantised scales or zeros is not served; save them as floats"
                )
        check_complete(names, NEEDED)

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`. The settings are read."""
        layout = _layout(name, tensors)
        columns = layout.shape[1]
        if not layout.is_along_rows:
            return layout.shape, wider(columns)
        return layout.shape, grouped(layout.bits, columns, layout.group, tensors["scale"], has_zeros=True)

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`."""
        from pagewire.workers.checkpoint.formats.grouped import GroupedIntegers
        from pagewire.workers.checkpoint.formats.reexpress import reexpressed

        layout = _layout(name, described(tensors))
        codes, scales, zeros = _codes(tensors["W_q"], layout), tensors["scale"], tensors["zero"]
        if layout.is_along_rows:
            rows, columns = layout.shape
            integers = GroupedIntegers(
                f"{name}.scale",
                layout.bits,
                columns,
                codes.reshape(rows, columns),
                scales.reshape(rows, -1),
                zeros.reshape(rows, -1),
                layout.group,
            )
            return integers.weight(dtype)
        dense = codes.float().sub_(zeros.float()).mul_(scales.float())
        return reexpressed("HQQ's groups across rows", [dense.reshape(layout.shape)], dtype)


def _layout(name: str, tensors: Parts) -> _Layout:
    """The settings of a module.

    Raises:
        LoadError: they are not served, or do not fit the tensors.
    """
    sizes = _integers(name, tensors, "shape")
    ((bits,), (axis,)) = (_integers(name, tensors, setting) for setting in ("nbits", "axis"))
    if len(sizes) != 2 or min(sizes) < 1 or bits not in BITS or axis not in (0, 1):
        raise LoadError(f"{name} is of shape {sizes} with {bits} bits and axis {axis}, which is not served")
    rows, columns = sizes
    group = columns if axis == 1 else rows
    if "group_size" in tensors:
        (group,) = _integers(name, tensors, "group_size")
    if group < 1 or rows * columns % group or (axis == 1 and columns % group):
        raise LoadError(f"{name} is of shape {sizes} in groups of {group}, which do not divide its rows")
    layout = _Layout((rows, columns), bits, group, axis == 1)
    count = rows * columns // group
    words, per_word = tensors["W_q"], PER_WORD[bits]
    held = words.num_bytes // (4 if bits == 3 else 1) * per_word
    packed_rows, packed_columns = layout.packed_shape
    if held != -(-packed_rows // per_word) * per_word * packed_columns:
        raise LoadError(f"{name}.W_q of shape {words.shape} does not hold {sizes} integers of {bits} bits")
    for suffix in ("scale", "zero"):
        part = tensors[suffix]
        if part.dtype not in SCALE_DTYPES or math.prod(part.shape) != count:
            raise LoadError(f"{name}.{suffix} must be {count} floats, not {part.shape} of {part.dtype}")
    return layout


def _integers(name: str, tensors: Parts, suffix: str) -> tuple[int, ...]:
    """The values of a small tensor of integers."""
    tensor = tensors[suffix]
    code = {"I32": "i", "I64": "q", "U8": "B"}.get(tensor.dtype)
    count = math.prod(tensor.shape)
    if code is None or not 1 <= count <= 4 or tensor.num_bytes != count * struct.calcsize(code):
        raise LoadError(
            f"{name}.{suffix} must be a few integers, not {quoted(tensor.shape)} of {tensor.dtype}"
        )
    return struct.unpack(f"<{count}{code}", tensor.content())


def _codes(words: Tensor, layout: _Layout) -> Tensor:
    """The integers, uint8 in `layout.packed_shape`: runs of rows, the first in the highest bits of the words."""
    import torch

    rows, columns = layout.packed_shape
    bits, per_word = layout.bits, PER_WORD[layout.bits]
    stream = words.contiguous().view(torch.int32 if bits == 3 else torch.uint8).reshape(-1, columns)
    runs = [stream >> bits * place & 2**bits - 1 for place in reversed(range(per_word))]
    return torch.cat(runs).to(torch.uint8)[:rows]


def of(config: Mapping[str, Any]) -> HqqFormat:
    """The format of a `quantization_config` of method `hqq`; the tensors of each module have its settings."""
    return HqqFormat()
