"""The rows of a batch that have LoRA adapters, as adapters.cpp takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.kernels.cpu.arena import LARGE_PAGE, Region
from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.memory import ALIGNMENT
from pagewire.kernels.cpu.tensors import DTYPES, last_contiguous
from pagewire.kernels.data.deltas import AdaptedLinear, AdapterRows, AdapterWeights, Delta, Shapes
from pagewire.kernels.data.weight import Linear

DeltaStruct, Deltas, RowsStruct, AdaptCall = map(structure, ("Delta", "Deltas", "AdapterRows", "AdaptCall"))


class _Table:
    """The changes of all products by an adapter. They, and this object, must live as long as it is used."""

    def __init__(self, num_products: int) -> None:
        self._parts: list[ctypes.Array[ctypes.Structure]] = []
        self._deltas = (Deltas * num_products)()
        self.address = ctypes.addressof(self._deltas)

    def add(self, product: int, deltas: Sequence[Delta], dtype: torch.dtype) -> None:
        """Set the changes of a product of this dtype."""
        part = (DeltaStruct * len(deltas))(*(_struct(delta, dtype) for delta in deltas))
        self._parts.append(part)
        self._deltas[product] = Deltas(ctypes.addressof(part), len(part))


def _struct(delta: Delta, dtype: torch.dtype) -> ctypes.Structure:
    return DeltaStruct(
        a=delta.a.data_ptr(),
        b=_address(delta.b),
        gain=_address(delta.gain),
        shift=_address(delta.shift),
        rank=len(delta.a),
        first=delta.first,
        n=delta.num_out,
        scale=delta.scale,
        is_float=delta.a.dtype != dtype,
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class DeltaMemory:
    """One piece of memory for all changes by an adapter, in large pages unless it is small."""

    def __init__(self, size: int) -> None:
        """Memory for changes that take `size` bytes in all, see `room_of`.

        Raises:
            OSError: there is not enough.
        """
        if size < LARGE_PAGE // 2:
            self._left = torch.empty(size, dtype=torch.uint8)
            return
        region = Region(size)
        self._left = torch.frombuffer(region.memory, dtype=torch.uint8)[region.offset : region.offset + size]

    def copies(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Copies of all changes of a product; to be called in the order in which a step reads products."""
        firsts = [self._copy(delta.a) for delta in deltas]
        copies = []
        for delta, a in zip(deltas, firsts, strict=True):
            assert a is not None
            b, gain, shift = map(self._copy, (delta.b, delta.gain, delta.shift))
            copies.append(replace(delta, a=a, b=b, gain=gain, shift=shift))
        return copies

    def _copy(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.nbytes:
            return tensor
        taken, self._left = self._left[: tensor.nbytes], self._left[_room(tensor) :]
        return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _room(tensor: Tensor) -> int:
    """Bytes from the beginning of a tensor to where the next one may begin."""
    return tensor.nbytes + -tensor.nbytes % ALIGNMENT


def room_of(delta: Delta) -> int:
    """Bytes that a change takes in an `DeltaMemory`."""
    return sum(_room(tensor) for tensor in delta.tensors)


class _Rows:
    """The struct of an `AdapterRows`, with what it points to."""

    def __init__(self, rows: AdapterRows) -> None:
        tables = [table_of(adapter).address for adapter in rows.adapters]
        self._tables = (ctypes.c_void_p * len(tables))(*tables)
        self.struct = RowsStruct(
            rows=rows.rows.data_ptr(),
            starts=rows.starts.data_ptr(),
            tables=ctypes.addressof(self._tables),
            count=len(tables),
            matrices=rows.num_matrices,
        )


def table_of(adapter: AdapterWeights) -> _Table:
    """The table of an adapter, made when it is first used."""
    if adapter.native is None:
        adapter.native = _Table(len(adapter.products))
        for product, deltas in enumerate(adapter.products):
            if deltas:
                adapter.native.add(product, deltas, adapter.dtype)
    table: _Table = adapter.native
    return table


def add_changes(adapter: AdapterWeights, product: int, deltas: Sequence[Delta]) -> None:
    """Set the changes of a product that has none, also in the table, so that no step has to make it.

    Raises:
        ValueError: one does not fit the product.
    """
    table = table_of(adapter)
    adapter.add(product, deltas)
    table.add(product, deltas, adapter.dtype)


def native_rows(rows: AdapterRows) -> ctypes.Structure:
    """The rows as the library takes them; valid as long as `rows`.

    Raises:
        ValueError: see `AdapterRows.check_indices`.
    """
    if rows.native is None:
        rows.check_indices()
        rows.native = _Rows(rows)
    struct: ctypes.Structure = rows.native.struct
    return struct


class RunningRows:
    """The rows of the running step that have adapters, for linear layers that are called together."""

    def __init__(self, linears: Iterable[Linear]) -> None:
        adapted = [linear for linear in linears if isinstance(linear, AdaptedLinear)]
        self._current: Callable[[], AdapterRows | None] | None = adapted[0].rows if adapted else None
        self._expected = {linear.number: (linear.out_features, linear.in_features) for linear in adapted}
        self._fitting: Shapes | None = None  # of adapters whose products are these

    def take(self, num_rows: int, dtype: torch.dtype) -> ctypes.Structure | None:
        """The rows as the library takes them, valid until the step ends; None: none has an adapter.

        Raises:
            ValueError: the adapters are of another model, or the step has not `num_rows` rows of this dtype.
        """
        if self._current is None or (rows := self._current()) is None:
            return None
        first = rows.adapters[0]
        if first.shapes is not self._fitting:  # thousands with experts
            shapes = dict(enumerate(first.shapes))
            if all(shapes.get(number) == shape for number, shape in self._expected.items()):
                self._fitting = first.shapes
        if first.shapes is not self._fitting or (rows.num_rows, first.dtype) != (num_rows, dtype):
            raise ValueError(f"adapters of another model, or of {rows.num_rows} rows for {num_rows}")
        return native_rows(rows)


def adapt(library: ctypes.CDLL, x: Tensor, out: Tensor, rows: AdapterRows, product: int) -> None:
    """See `pagewire.kernels.adapted.adapt`."""
    x = last_contiguous(x)
    call = AdaptCall(
        adapters=ctypes.addressof(native_rows(rows)),
        x=x.data_ptr(),
        out=out.data_ptr(),
        product=product,
        k=x.shape[1],
        n=out.shape[1],
        x_stride=x.stride(0),
        dtype=DTYPES[x.dtype],
        num_threads=torch.get_num_threads(),
    )
    library.pagewire_adapt(ctypes.byref(call))
