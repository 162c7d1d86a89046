"""Matrices as a checkpoint holds them, and the products that they are packed into.

A `Weight` is cut, joined and moved as it is stored; only `dense`, and the packing of a few rows at a time, convert
it. Its scheme defines how its numbers are stored: `DENSE`, plain floats, or quantised as in `integers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]


class Scheme(Protocol):
    """How the numbers of a matrix [N, K] are stored in tensors, its parts."""

    @property
    def name(self) -> str:
        """Names differ if schemes do."""

    def rows(self, parts: Parts, start: int, stop: int) -> Parts:
        """The parts of the rows from `start` to before `stop`, as views."""

    def take(self, parts: Parts, index: Tensor) -> Parts:
        """The parts of the rows of an index int64 [n], in its order, as copies."""

    def columns(self, parts: Parts, start: int, stop: int) -> Parts:
        """The parts of the columns from `start` to before `stop`, as views."""

    def joined(self, parts: Sequence[Parts]) -> Parts:
        """The parts of several matrices of equal K, one below the other."""

    def dense(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] in `dtype`; a view of its only part if that is all it takes."""


class DenseScheme:
    """Plain numbers. The parts are blocks of rows [n, K], one below the other, in any float dtype."""

    name = "dense"

    def rows(self, parts: Parts, start: int, stop: int) -> Parts:
        """See `Scheme.rows`."""
        cut, first = [], 0
        for part in parts:
            block = part[max(0, start - first) : max(0, stop - first)]
            if len(block):
                cut.append(block)
            first += len(part)
        return tuple(cut)

    def take(self, parts: Parts, index: Tensor) -> Parts:
        """See `Scheme.take`."""
        (matrix,) = parts if len(parts) == 1 else (torch.cat(parts),)
        return (matrix[index],)

    def columns(self, parts: Parts, start: int, stop: int) -> Parts:
        """See `Scheme.columns`."""
        return tuple(part[:, start:stop] for part in parts)

    def joined(self, parts: Sequence[Parts]) -> Parts:
        """See `Scheme.joined`. Nothing is copied."""
        return tuple(block for blocks in parts for block in blocks)

    def dense(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """See `Scheme.dense`."""
        blocks = [part.to(dtype) for part in parts]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


DENSE = DenseScheme()


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [N, K] as the checkpoint holds it: N outputs, K inputs."""

    scheme: Scheme
    parts: Parts
    """The tensors that hold it; the scheme defines their meaning."""
    shape: tuple[int, int]
    dtype: torch.dtype
    """The dtype of the inputs and outputs of its product, and of `dense`."""

    def rows(self, part: int, of: int) -> Weight:
        """The outputs of share `part` (from 0), if N is divided into `of` equal shares.

        Raises:
            ValueError: N cannot be divided so, or there is no such share.
        """
        start, stop = _share(self.shape[0], part, of, "rows")
        return self.slice(start, stop)

    def columns(self, part: int, of: int) -> Weight:
        """The inputs of share `part` (from 0), if K is divided into `of` equal shares.

        Raises:
            ValueError: K cannot be divided so, or there is no such share.
        """
        start, stop = _share(self.shape[1], part, of, "columns")
        return self.column_slice(start, stop)

    def slice(self, start: int, stop: int) -> Weight:
        """The rows from `start` to before `stop`; `0 <= start < stop <= N`."""
        parts = self.scheme.rows(self.parts, start, stop)
        return Weight(self.scheme, parts, (stop - start, self.shape[1]), self.dtype)

    def column_slice(self, start: int, stop: int) -> Weight:
        """The columns from `start` to before `stop`; `0 <= start < stop <= K`.

        Raises:
            ValueError: the scheme has groups of columns, and one would be cut.
        """
        parts = self.scheme.columns(self.parts, start, stop)
        return Weight(self.scheme, parts, (self.shape[0], stop - start), self.dtype)

    def take(self, index: Tensor) -> Weight:
        """The rows of an index int64 [n], in its order, as a copy."""
        return Weight(
            self.scheme, self.scheme.take(self.parts, index), (len(index), self.shape[1]), self.dtype
        )

    @staticmethod
    def joined(weights: Sequence[Weight]) -> Weight:
        """Several matrices of equal K as one, one below the other: one product in place of several.

        Raises:
            ValueError: they differ in scheme, dtype or K.
        """
        first = weights[0]
        forms = {(weight.scheme.name, weight.dtype, weight.shape[1]) for weight in weights}
        if len(forms) > 1:
            raise ValueError(f"weights of different forms cannot be joined: {sorted(map(str, forms))}")
        parts = first.scheme.joined([weight.parts for weight in weights])
        return Weight(
            first.scheme, parts, (sum(weight.shape[0] for weight in weights), first.shape[1]), first.dtype
        )

    def to(self, device: torch.device) -> Weight:
        """The same weight with its parts on a device."""
        return Weight(self.scheme, tuple(part.to(device) for part in self.parts), self.shape, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its parts."""
        return sum(part.nbytes for part in self.parts)

    def dense(self) -> Tensor:
        """The matrix [N, K] in `dtype`; may be a view of the checkpoint."""
        return self.scheme.dense(self.parts, self.dtype)


def dense_weight(matrix: Tensor, dtype: torch.dtype | None = None) -> Weight:
    """A matrix [N, K] of plain numbers as a `Weight`, without a copy.

    dtype: of the product's inputs and outputs, by default the matrix's own.

    Raises:
        ValueError: it is no matrix.
    """
    if matrix.dim() != 2:
        raise ValueError(f"a weight is a matrix [N, K], not of shape {tuple(matrix.shape)}")
    num_out, num_in = matrix.shape
    return Weight(DENSE, (matrix,), (num_out, num_in), dtype or matrix.dtype)


def _share(size: int, part: int, of: int, axis: str) -> tuple[int, int]:
    if of < 1 or size % of or not 0 <= part < of:
        raise ValueError(f"{size} {axis} have no share {part} of {of} equal ones")
    share = size // of
    return part * share, (part + 1) * share


class Linear(Protocol):
    """A linear layer on a device, made by `pagewire.kernels.linear.pack`."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    num_bytes: int
    """Bytes of the packed weight and the bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features], both in `dtype`.

        Raises:
            ValueError: x has another size or dtype.
        """


def check_rows(x: Tensor, in_features: int, dtype: torch.dtype) -> None:
    """Raise ValueError if x is not rows [..., in_features] of a dtype."""
    if x.shape[-1] != in_features or x.dtype != dtype:
        raise ValueError(f"rows of {in_features} {dtype} expected, not {x.shape[-1]} {x.dtype}")


class UnpackedLinear:
    """A linear layer over a dense `weight` [N, K] that stays as it is; `product` computes `x @ weight.T + bias`."""

    def __init__(self, product: Product, weight: Weight, bias: Tensor | None) -> None:
        self._product, self.weight, self.bias = product, weight.dense(), bias
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.num_bytes = self.weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        check_rows(x, self.in_features, self.dtype)
        return self._product(x, self.weight, self.bias)


class Product(Protocol):
    """A function that multiplies rows x [..., K] with a weight [N, K], and adds a bias [N]."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor:
        """[..., N]."""
