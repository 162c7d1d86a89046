"""Bytes of a packed weight by its shape, without packing it; the layouts are those of the C++ code.

Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from pagewire.kernels.cpu.build import EMULATED_TILES

REFERENCE = "reference"
"""The kernels in plain torch, which pack nothing."""
TILED = {  # the dtypes that an instruction set multiplies by matrix tiles
    "amx": {"bfloat16"},
    "amx_fp16": {"bfloat16", "float16"},
    EMULATED_TILES: {"bfloat16", "float16"},
}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TILE_DEPTH = 32  # of floats
WHOLE_ROW_DEPTH = 64  # what k is rounded up to where integers of a row share a scale


class IntegerForm(NamedTuple):
    """What the size of integers with scales depends on."""

    bits: int
    """8 or 4."""
    group: int | None
    """Columns that share a scale; None: all of a row."""
    has_offsets: bool
    scale_bytes: int = 2


def panel(isa: str) -> int:
    """Outputs of a panel of floats."""
    if isa == REFERENCE:
        return 1
    return {"avx2": 16, "avx_vnni": 16, "portable": 8}.get(isa, 64)


def integer_panel(isa: str) -> int:
    """Outputs of a panel of integers: half of those of floats where AVX-512 multiplies them by vectors alone."""
    return 32 if isa.startswith("avx512") else panel(isa)


def packed_bytes(rows: int, columns: int, dtype: str, isa: str) -> int:
    """Bytes of a float weight [rows, columns] in a dtype ("bfloat16"), packed for an instruction set."""
    depth = 1
    if dtype in TILED.get(isa, ()):
        depth = TILE_DEPTH
    elif dtype == "bfloat16" and isa in ("avx512_bf16", "amx", "amx_fp16"):
        depth = 2
    return _up(rows, panel(isa)) * _up(columns, depth) * ITEM_BYTES[dtype]


def packed_integer_bytes(rows: int, columns: int, form: IntegerForm, isa: str) -> int:
    """Bytes of a weight [rows, columns] of integers, packed with its scales and offsets for an instruction set."""
    width = columns if form.group else _up(columns, WHOLE_ROW_DEPTH)
    groups = -(-columns // form.group) if form.group else 1
    scales = groups * form.scale_bytes * (2 if form.has_offsets else 1)
    return _up(rows, integer_panel(isa)) * (width * form.bits // 8 + scales)


def _up(size: int, step: int) -> int:
    return size + -size % step
