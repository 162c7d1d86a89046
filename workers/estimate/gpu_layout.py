"""How weights lie in a GPU's memory, as `kernels/cuda/linear.py` packs them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.kernels.cpu.panels import ITEM_BYTES, NumberFormat

GPU = "cuda"
"""Stands in the place of an instruction set for the kernels of a GPU."""
STEP, OUTPUTS = 32, 32
"""Columns of a step, and outputs of a warp, of which a weight has whole numbers."""


def stays_packed(stored: NumberFormat, num_in: int, dtype: str) -> bool:
    """True if a weight of integers has a kernel, as `kernels.cuda.linear.why_not` finds of the loaded weight.

    num_in: its columns. dtype: of the rows that are multiplied with it.
    """
    if stored.is_float or dtype not in ("bfloat16", "float16") or num_in % STEP:
        return False
    return not stored.has_offsets if stored.group is None else stored.scale_bytes == 2


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """The sizes of weights on a GPU, as `Panels` has those on a CPU. dtype: of what is dense."""

    dtype: str

    def held(self, stored: NumberFormat, num_in: int) -> NumberFormat:
        """How a weight that is stored so lies on the GPU."""
        return (
            stored if stays_packed(stored, num_in, self.dtype) else NumberFormat(8 * ITEM_BYTES[self.dtype])
        )

    def float_size(self, rows: int, columns: int, dtype: str) -> int:
        """See `Panels.float_size`: nothing is padded."""
        return rows * columns

    def integer_bytes(self, rows: int, columns: int, stored: NumberFormat) -> int:
        """See `Panels.integer_bytes`, of a weight that stays packed."""
        padded = rows + -rows % OUTPUTS
        codes = padded * columns // (2 if stored.bits == 4 else 1)
        if stored.group is None:  # a scale in float32 for each row
            return codes + 4 * rows
        groups = -(-columns // stored.group)
        return codes + padded * groups * stored.scale_bytes * (1 + stored.has_offsets)
