"""Tables whose rows the library reads by number: of embeddings, and of cosines and sines."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagewire.kernels.cpu.integers import SchemeStruct
from pagewire.kernels.cpu.library import structure
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.layer import Angles, LayerNorm, Norm
from pagewire.kernels.data.weight import DENSE, Weight

AnglesParameters, EmbeddingRows = map(structure, ("Angles", "EmbeddingRows"))


def are_rows(tables: Sequence[Weight], angles: Sequence[Angles], dtype: torch.dtype) -> bool:
    """True if the library can read rows of these tables, and makes numbers of this dtype of them."""
    if not all(isinstance(table.scheme, Integers) or table.scheme is DENSE for table in tables):
        return False
    parts = [part for pair in angles for part in pair]
    if {table.dtype for table in tables} | {part.dtype for part in parts} != {dtype}:
        return False
    return all(part.is_contiguous() for part in (*parts, *(part for table in tables for part in table.parts)))


@dataclass(frozen=True)
class Beginning:
    """What tokens begin with: rows of words, and of positions where there are any, added up and then normed.

    words: [V or more, H], dense or integers, whose numbers are multiplied by factor.
    positions: [P, H], dense; None: there are none. norm: of the sum; None: it is not normed.
    """

    words: Weight
    factor: float = 1.0
    positions: Weight | None = None
    norm: Norm | LayerNorm | None = None

    def fit(self, angles: Sequence[Angles], dtype: torch.dtype) -> bool:
        """True if the library can read the tables, those of angles with them, and makes numbers of this dtype."""
        positions = self.positions
        if positions is None:
            return are_rows([self.words], angles, dtype)
        if positions.scheme is not DENSE or positions.shape[1] != self.words.shape[1]:
            return False
        return are_rows([self.words, positions], angles, dtype)


class RowTable:
    """A table of embeddings [V, H], dense or integers, for which `are_rows` holds, as an `EmbeddingRows`."""

    def __init__(self, table: Weight, factor: float = 1.0) -> None:
        """factor: of each number."""
        rows, *others = table.parts
        self._table, self._form = table, None
        if isinstance(table.scheme, Integers):
            self._form = SchemeStruct(table.scheme, others[0].dtype, len(others) > 1)
        scales, offsets = (*(part.data_ptr() for part in others), None, None)[:2]
        self.struct = EmbeddingRows(
            rows=rows.data_ptr(),
            scales=scales,
            offsets=offsets,
            form=None if self._form is None else self._form.address,
            row_bytes=rows.stride(0) * rows.itemsize,
            scale_bytes=others[0].stride(0) * others[0].itemsize if others else 0,
            count=table.shape[0],
            factor=factor,
        )


def angle_tables(tables: Sequence[Angles]) -> ctypes.Array[ctypes.Structure]:
    """Tables of cosines and sines [P, rot_dim] as `Angles`; they have to live as long."""
    structs = (AnglesParameters * max(1, len(tables)))()
    for struct, (cos, sin) in zip(structs, tables, strict=False):
        struct.cos, struct.sin, struct.half = cos.data_ptr(), sin.data_ptr(), cos.shape[1] // 2
    return structs
