"""What LoRA adapters change in the products of a model, and the rows of a step that have adapters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.weight import Linear

PANEL = 64
"""Columns of a second matrix that lie together, as adapters.cpp reads them."""
Shapes = tuple[tuple[int, int], ...]
"""The outputs and inputs (N, K) of each linear layer of a model that adapters may change, by its number."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter changes in some outputs of a product of x [T, K].

    With `b`: `out = gain * (out + scale * (x @ a.T) @ b.T) + shift`, Hu et al. 2021 ("LoRA"); the gain is that of
    Liu et al. 2024 ("DoRA"). Without: `out = scale * x @ a.T + shift`, a weight in place of the product's own.
    Numbers in between are float32; the result is rounded once.
    """

    a: Tensor
    """[rank, K], contiguous, in the dtype of the product, or float32."""
    b: Tensor | None
    """[ceil(n / 64), rank, 64], see `panels`, in the dtype of `a`; None: rank is n."""
    first: int
    """The first of the n outputs."""
    num_out: int
    """The number n of outputs."""
    scale: float = 1.0
    gain: Tensor | None = None
    """float32 [n], contiguous; None for 1."""
    shift: Tensor | None = None
    """float32 [n], contiguous; None for 0."""

    @property
    def second(self) -> Tensor:
        """The second matrix [n, rank]."""
        assert self.b is not None
        return self.b.transpose(1, 2).flatten(0, 1)[: self.num_out]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that it is made of."""
        return [tensor for tensor in (self.a, self.b, self.gain, self.shift) if tensor is not None]

    def to(self, device: torch.device) -> Delta:
        """The same with its tensors on a device."""
        b, gain, shift = (None if x is None else x.to(device) for x in (self.b, self.gain, self.shift))
        return replace(self, a=self.a.to(device), b=b, gain=gain, shift=shift)

    def check(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """Refuse what does not fit a product of this shape (N, K) and dtype.

        Raises:
            ValueError: shapes, dtypes or strides are not as above.
        """
        num_out, num_in = shape
        fits = self.a.dim() == 2 and self.a.shape[1] == num_in and self.a.dtype in (dtype, torch.float32)
        of_b = (-(-self.num_out // PANEL), len(self.a), PANEL)
        if self.b is None:
            fits &= len(self.a) == self.num_out
        else:
            fits &= self.b.shape == of_b and self.b.dtype == self.a.dtype
        fits &= 0 <= self.first <= self.first + self.num_out <= num_out
        for vector in (self.gain, self.shift):
            fits &= vector is None or (vector.shape == (self.num_out,) and vector.dtype == torch.float32)
        if not fits or not all(tensor.is_contiguous() for tensor in self.tensors):
            shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in self.tensors)
            raise ValueError(f"an adapter of {shapes} does not fit a product {shape} of {dtype}")


def panels(second: Tensor) -> Tensor:
    """A second matrix [n, rank] as `Delta.b`: 64 outputs at a time, with zeros behind the last, and by rank."""
    if missing := -len(second) % PANEL:
        second = functional.pad(second, (0, 0, 0, missing))
    return second.reshape(len(second) // PANEL, PANEL, second.shape[1]).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class EmbeddingDelta:
    """What an adapter changes in the embedding of tokens: `rows[id] + scale * a[id] @ b`."""

    rows: Tensor | None
    """[V', H], in place of the model's own; None: these."""
    a: Tensor | None = None
    """float32 [V', rank]; None: nothing is added."""
    b: Tensor | None = None
    """float32 [H, rank]; None likewise."""
    scale: float = 1.0

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that it is made of."""
        return [tensor for tensor in (self.rows, self.a, self.b) if tensor is not None]


class AdapterWeights:
    """A loaded adapter: what it changes in each product of a model, and in its embedding.

    products: the changes of each product, in the order of `shapes`; most have one or none, joined ones several.
    num_bytes: of all its tensors. native: the same as the CPU's compiled kernels take it; None without them.
    table: the same as the GPU's kernels take it (`cuda.lora.Table`), once they have.
    """

    def __init__(
        self,
        products: Sequence[Sequence[Delta]],
        shapes: Shapes,
        dtype: torch.dtype,
        embedding: EmbeddingDelta | None = None,
        num_extra_tokens: int = 0,
        output: int | None = None,
    ) -> None:
        """The adapter of a model of `dtype` with products of these shapes.

        output: the number of the output layer; None: the model has none here.
        num_extra_tokens: that the adapter adds to the model's vocabulary. If it has a whole weight of the output
        layer, this has as many outputs more than its shape says.

        Raises:
            ValueError: a change does not fit its product.
        """
        if len(products) != len(shapes):
            raise ValueError(f"changes of {len(products)} products for {len(shapes)}")
        self.num_extra_outputs = 0
        self.products: list[Sequence[Delta]] = [()] * len(shapes)
        self.shapes, self.dtype, self.output = shapes, dtype, output
        self.embedding, self.num_extra_tokens = embedding, num_extra_tokens
        self.num_bytes = 0 if embedding is None else sum(tensor.nbytes for tensor in embedding.tensors)
        self.native: Any = None
        self.table: Any = None
        for number, deltas in enumerate(products):
            if deltas:
                self.add(number, deltas)

    def add(self, product: int, deltas: Sequence[Delta]) -> None:
        """Set the changes of a product that has none.

        Raises:
            ValueError: one does not fit the product.
        """
        num_out, num_in = self.shapes[product]
        for delta in deltas:
            is_wide = product == self.output and delta.num_out == num_out + self.num_extra_tokens
            self.num_extra_outputs = self.num_extra_tokens if is_wide else self.num_extra_outputs
            delta.check((num_out + self.num_extra_tokens if is_wide else num_out, num_in), self.dtype)
        self.products[product] = deltas
        self.num_bytes += sum(tensor.nbytes for delta in deltas for tensor in delta.tensors)


class AdapterRows:
    """The rows of a batch that have adapters, in order of the adapter: each adapter's stand together.

    rows: int64 [n], indices of rows in the batch, on the host. starts: int64 [num_matrices * len(adapters) + 1],
    where in `rows` those of each adapter begin, and the end. adapters: at least one. num_rows: of the batch.
    num_matrices: of a grouped product, whose rows are in order of the matrix, and each matrix's in order of the
    adapter; matrix m is then the m-th product behind the one that is named.
    native: the same as the device's kernels take it, once they have.
    """

    __slots__ = ("adapters", "native", "num_matrices", "num_rows", "rows", "starts")

    def __init__(
        self,
        rows: Tensor,
        starts: Tensor,
        adapters: Sequence[AdapterWeights],
        num_rows: int,
        num_matrices: int = 1,
    ) -> None:
        self.rows, self.starts, self.adapters, self.num_rows = rows, starts, adapters, num_rows
        self.num_matrices = num_matrices
        self.native: Any = None

    def grouped(self, sources: Tensor, counts: Sequence[int]) -> AdapterRows:
        """The same for a grouped product of these rows.

        Args:
            sources: int64 [R], for each row of the product the row of the batch that it is.
            counts: how many rows each matrix has, one behind the other.
        """
        adapter_of = torch.full((self.num_rows,), -1)
        for number, (_, index) in enumerate(self.groups()):
            adapter_of[index] = number
        adapter = adapter_of[sources.cpu()]
        matrix = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        rows = (adapter >= 0).nonzero().flatten()
        group = (matrix * len(self.adapters) + adapter)[rows]
        sizes = torch.bincount(group, minlength=len(counts) * len(self.adapters))
        starts = functional.pad(sizes.cumsum(0), (1, 0))
        ordered = rows[group.argsort(stable=True)]
        return AdapterRows(ordered, starts, self.adapters, len(sources), len(counts))

    def check_indices(self) -> None:
        """Refuse indices that would make a kernel read other memory.

        Raises:
            ValueError: an index lies outside the batch, or the adapters are not of one model.
        """
        first, int64 = self.adapters[0], torch.int64
        if self.rows.dtype != int64 or self.starts.dtype != int64 or self.starts[-1] != len(self.rows):
            raise ValueError("indices of rows and of their beginnings are int64, and agree")
        if len(self.starts) != self.num_matrices * len(self.adapters) + 1 or not self.rows.is_contiguous():
            raise ValueError(f"{len(self.starts)} beginnings for the rows of {len(self.adapters)} adapters")
        if len(self.rows) and not 0 <= int(self.rows.min()) <= int(self.rows.max()) < self.num_rows:
            raise ValueError(f"rows outside of a batch of {self.num_rows}")
        if any((a.shapes, a.dtype) != (first.shapes, first.dtype) for a in self.adapters):
            raise ValueError("adapters of several models")

    def check(self, product: int, x: Tensor, out: Tensor) -> None:
        """Refuse tensors that are not the input [T, K] and output [T, N] of a product of these adapters.

        Raises:
            ValueError: they are not.
        """
        shapes = self.adapters[0].shapes[product : product + self.num_matrices]
        if len(shapes) != self.num_matrices or len(set(shapes)) != 1:
            raise ValueError(f"{self.num_matrices} products of one shape expected")
        num_out, num_in = shapes[0]
        num_out += self.num_extra(product)
        if x.shape != (self.num_rows, num_in) or out.shape != (self.num_rows, num_out):
            raise ValueError(
                f"adapters of {self.num_rows} rows of a product ({num_out}, {num_in}) for an input "
                f"{tuple(x.shape)} and an output {tuple(out.shape)}"
            )
        if not out.is_contiguous() or x.dtype != out.dtype or x.dtype != self.adapters[0].dtype:
            raise ValueError(f"a contiguous output expected, all of {self.adapters[0].dtype}")

    def num_extra(self, product: int) -> int:
        """How many outputs a product must have behind those of the model, for tokens that adapters bring."""
        if product != self.adapters[0].output:
            return 0
        return max(adapter.num_extra_outputs for adapter in self.adapters)

    def close(self, logits: Tensor) -> None:
        """Make tokens that a row's own adapter lacks impossible, in place; logits [num_rows, V + extra]."""
        if not (extra := max(adapter.num_extra_outputs for adapter in self.adapters)):
            return
        ends = torch.full((len(logits), 1), logits.shape[1] - extra)
        for adapter, index in self.groups():
            ends[index] += adapter.num_extra_outputs
        behind = torch.arange(logits.shape[1], device=logits.device) >= ends.to(logits.device)
        logits.masked_fill_(behind, -torch.inf)

    def of(self, adapters: Collection[AdapterWeights]) -> AdapterRows:
        """The rows of some of the adapters; not of a grouped product."""
        groups = [(adapter, index) for adapter, index in self.groups() if adapter in adapters]
        sizes = torch.tensor([0, *(len(index) for _, index in groups)])
        ordered = torch.cat([index for _, index in groups])
        return AdapterRows(ordered, sizes.cumsum(0), [adapter for adapter, _ in groups], self.num_rows)

    def groups(self, device: torch.device | None = None) -> list[tuple[AdapterWeights, Tensor]]:
        """Each adapter, and the indices int64 of its rows; of a grouped product, for each matrix.

        device: where the indices are wanted, other than on the host. No device is waited for.
        """
        starts = self.starts.tolist()
        adapters = [*self.adapters] * self.num_matrices
        rows = self.rows
        if device is not None and device.type != "cpu":
            rows = rows.pin_memory().to(device, non_blocking=True)
        return [
            (adapter, rows[start:stop])
            for adapter, start, stop in zip(adapters, starts, starts[1:], strict=False)
        ]


@runtime_checkable
class AdaptedLinear(Linear, Protocol):
    """A linear layer whose rows may have adapters: see `pagewire.kernels.adapted.Adapted`.

    linear: the layer without adapters. number: its own among all of a model that adapters may change.
    """

    linear: Linear
    number: int

    def rows(self) -> AdapterRows | None:
        """The rows of the running step that have adapters; None: none has."""


def plain(linear: Linear) -> Linear:
    """A linear layer without its adapters."""
    return linear.linear if isinstance(linear, AdaptedLinear) else linear


def first_adapted(linears: Sequence[Linear]) -> AdaptedLinear | None:
    """The first of linear layers that are called together; None: they have no adapters.

    Raises:
        ValueError: their numbers do not follow one another.
    """
    first = linears[0]
    if not isinstance(first, AdaptedLinear):
        return None
    numbers = [linear.number if isinstance(linear, AdaptedLinear) else -1 for linear in linears]
    if numbers != [*range(first.number, first.number + len(linears))]:
        raise ValueError("linear layers that are called together have numbers that follow one another")
    return first


def adapt_with(
    linear: Callable[[Tensor, Tensor], Tensor], x: Tensor, out: Tensor, rows: AdapterRows, product: int
) -> None:
    """See `pagewire.kernels.adapted.adapt`, in plain PyTorch; linear: gives `x @ weight.T`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    for number, (adapter, at) in enumerate(rows.groups(x.device)):
        matrix = number // len(rows.adapters)
        for delta in adapter.products[product + matrix] if len(at) else ():
            places = slice(delta.first, delta.first + delta.num_out)
            value = out[at, places].to(dtype)
            if len(delta.a):
                low = delta.scale * linear(x[at].to(dtype), delta.a.to(dtype))
                value = low if delta.b is None else value + linear(low, delta.second.to(dtype))
            if delta.gain is not None:
                value = value * delta.gain
            if delta.shift is not None:
                value = value + delta.shift
            out[at, places] = value.to(out.dtype)
