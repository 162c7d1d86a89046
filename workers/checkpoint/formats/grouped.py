"""Integers with a scale, and perhaps a zero, for each group of columns: what most formats hold, as a `Weight`.

Integers of 1 to 4 bits are held in 4 bits, and those of 5 to 8 bits in 8; both exactly. So are groups of a size
that kernels do not know, if it is a multiple of one that they know. The rest is quantised again, in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.data.integers import Integers, integer_weight, row_blocks
from pagewire.kernels.data.weight import Weight
from pagewire.workers.checkpoint.formats.format import known_group, width
from pagewire.workers.checkpoint.formats.packing import pairs, split_pairs
from pagewire.workers.checkpoint.formats.reexpress import reexpressed
from pagewire.workers.errors import LoadError


@dataclass(frozen=True)
class GroupedIntegers:
    """`W[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]) + offsets[n, g]`, where column k is in group g."""

    scales_name: str
    """The name of the tensor that holds the scales, for messages."""
    bits: int
    """From 1 to 8."""
    num_in: int
    """K."""
    codes: Tensor
    """uint8 [N, K], less than `2 ** bits`; integers of 4 bits may lie in pairs [N, K / 2] (`packing.pairs`)."""
    scales: Tensor
    """[N, G], in float16, bfloat16 or float32."""
    zeros: Tensor | None
    """Numbers [N, G], integers in most formats; None: all are `2 ** (bits - 1)`."""
    group: int
    """How many columns have a scale; the last group of a row may have fewer."""
    index: Tensor | None = None
    """The groups of the columns, int64 [K], from 0 to G - 1; None: the columns of a group follow each other."""
    offsets: Tensor | None = None
    """Floats [N, G], where `zeros` are None; None: all are 0."""

    def weight(self, dtype: torch.dtype) -> Weight:
        """The matrix [N, K] for a product whose inputs and outputs are of a dtype.

        Raises:
            LoadError: a scale is not finite, or it is 0 and the integers say that the weights are not.
        """
        self._check_scales()
        if self.index is not None and not torch.equal(self.index, self._adjacent()):
            kind = f"integers of {self.bits} bits whose groups are not of adjacent columns"
            return reexpressed(kind, self._dense_blocks(), dtype)
        if self.group >= self.num_in:
            return self._exact(None, dtype)
        if (group := known_group(self.group, self.num_in)) is not None:
            return self._exact(group, dtype)
        kind = f"integers of {self.bits} bits in groups of {self.group}"
        return reexpressed(kind, self._dense_blocks(), dtype)

    def _exact(self, group: int | None, dtype: torch.dtype) -> Weight:
        """The same integers, with zeros as offsets: in float32, which holds an integer times a scale exactly."""
        num_bits = width(self.bits, self.num_in)
        middle = 2 ** (num_bits - 1)
        codes, scales, offsets = self.codes, self.scales, None
        if not (num_bits == 4 and self._are_pairs):
            shift = middle - 2 ** (self.bits - 1)
            codes = self._values(0, len(codes))
            codes = codes + shift if shift else codes
            codes = pairs(codes) if num_bits == 4 else codes
        if self.zeros is not None:
            scales = scales.float()
            offsets = self._per_group(scales * (2 ** (self.bits - 1) - self.zeros.float()), group)
        if self.offsets is not None:
            scales, offsets = scales.float(), self._per_group(self.offsets.float(), group)
        return integer_weight(
            Integers(num_bits, group, middle),
            codes.contiguous(),
            self._per_group(scales, group),
            offsets,
            dtype,
        )

    def _dense_blocks(self) -> Iterator[Tensor]:
        """The matrix in blocks of rows, float32 [n, K]."""
        index = self._adjacent() if self.index is None else self.index
        for start, stop in row_blocks(len(self.codes), self.num_in):
            zeros: Tensor | int = 2 ** (self.bits - 1)
            if self.zeros is not None:
                zeros = self.zeros[start:stop].float()[:, index]
            dense = (self._values(start, stop).float() - zeros) * self.scales[start:stop].float()[:, index]
            yield dense if self.offsets is None else dense + self.offsets[start:stop].float()[:, index]

    def _values(self, start: int, stop: int) -> Tensor:
        """The integers of some rows, uint8 [n, K]."""
        codes = self.codes[start:stop]
        return split_pairs(codes) if self._are_pairs else codes

    @property
    def _are_pairs(self) -> bool:
        return self.codes.shape[1] != self.num_in

    def _adjacent(self) -> Tensor:
        return torch.arange(self.num_in) // self.group

    def _per_group(self, values: Tensor, group: int | None) -> Tensor:
        """A value [N, G] of each group for the groups that the kernels know."""
        if group is None or group == self.group:
            return values.contiguous()
        repeated: Tensor = values.repeat_interleave(self.group // group, dim=1)
        return repeated[:, : self.num_in // group].contiguous()

    def _check_scales(self) -> None:
        if not self.scales.isfinite().all():
            raise LoadError(f"{self.scales_name} holds scales that are not finite")
        for row in (self.scales == 0).any(dim=1).nonzero().flatten().tolist():
            if not self._codes_are_zero_where_scales_are(row):
                raise LoadError(f"{self.scales_name} holds scales of 0 for weights that are not 0")

    def _codes_are_zero_where_scales_are(self, row: int) -> bool:
        index = self._adjacent() if self.index is None else self.index
        zeros = (
            torch.full_like(self.scales[row], 2 ** (self.bits - 1)) if self.zeros is None else self.zeros[row]
        )
        stray = (self.scales[row][index] == 0) & (self._values(row, row + 1)[0] != zeros[index])
        return not stray.any()


def group_index(
    name: str, tensors: Mapping[str, Tensor], suffix: str, size: tuple[int, int]
) -> Tensor | None:
    """The groups of the columns of a module's matrix, int64 [K], as `GroupedIntegers` takes them.

    size: K, and the number of groups.

    Raises:
        LoadError: they are of another shape or dtype, or there are no such groups.
    """
    if (index := tensors.get(suffix)) is None:
        return None
    num_in, num_groups = size
    if tuple(index.shape) != (num_in,) or index.dtype not in (torch.int32, torch.int64):
        raise LoadError(
            f"{name}.{suffix} must be int32 of the shape ({num_in},), not {index.dtype} of {tuple(index.shape)}"
        )
    low, high = int(index.min()), int(index.max())
    if low == high and low in (-1, 0):
        return None  # Columns were not reordered, and the tool has left what the tensor began with.
    if low < 0 or high >= num_groups:
        raise LoadError(f"{name}.{suffix} holds groups from {low} to {high}, of {num_groups}")
    return index.long()
