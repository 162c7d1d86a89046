"""How weights are packed for a CPU: in panels of outputs. Imports no torch.

The C++ code gets the sizes of panels from here, as macros: so a packed weight's bytes are known without a library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TILE_DEPTH = 32  # columns that a product of matrix tiles of floats takes
ROW_DEPTH = 64  # the same of integers, which is what whole rows with one scale are rounded up to
MACROS = (f"-DPAGEWIRE_TILE_DEPTH={TILE_DEPTH}", f"-DPAGEWIRE_ROW_DEPTH={ROW_DEPTH}")


class NumberFormat(NamedTuple):
    """How the numbers of a matrix are held: floats, or integers with scales."""

    bits: int
    """Of a number, without its scale: 32 or 16 are floats, 8, 6 and 4 are integers."""
    group: int | None = None
    """Columns that share a scale; None: all of a row."""
    has_offsets: bool = False
    scale_bytes: int = 2
    """Of a scale, and of an offset."""

    @property
    def is_float(self) -> bool:
        """True for plain floats."""
        return self.bits >= 16

    @property
    def name(self) -> str:
        """Such as "int4/32"."""
        return f"float{self.bits}" if self.is_float else f"int{self.bits}/{self.group or 'row'}"


@dataclass(frozen=True, slots=True)
class Panels:
    """The sizes of panels for one instruction set."""

    floats: int = 1
    """Outputs of a panel of floats."""
    integers: int = 1
    depths: frozenset[tuple[str, int]] = frozenset()
    """Dtypes whose columns are multiplied several at a time, and how many: {("bfloat16", 2)}."""

    @property
    def macros(self) -> tuple[str, ...]:
        """The compiler's flags that say so."""
        return (f"-DPAGEWIRE_PANEL={self.floats}", f"-DPAGEWIRE_INTEGER_PANEL={self.integers}")

    def float_size(self, rows: int, columns: int, dtype: str) -> int:
        """How many numbers of a dtype ("bfloat16") a packed weight [rows, columns] has, with those of padding."""
        return _up(rows, self.floats) * _up(columns, dict(self.depths).get(dtype, 1))

    def integer_bytes(self, rows: int, columns: int, stored: NumberFormat) -> int:
        """Bytes of a packed weight [rows, columns] of integers, with its scales and offsets."""
        width = columns if stored.group else _up(columns, ROW_DEPTH)
        groups = -(-columns // stored.group) if stored.group else 1
        scales = groups * stored.scale_bytes * (1 + stored.has_offsets)
        return _up(rows, self.integers) * (width * stored.bits // 8 + scales)


UNPACKED = Panels()
"""Of the kernels in plain torch, which pack nothing."""


def _up(size: int, step: int) -> int:
    return size + -size % step
