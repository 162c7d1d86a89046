"""What LoRA adapters add to a product: two kernels for all adapters of a batch. See `pagewire.kernels.adapted`.

All that differs from step to step lies in device memory: an adapter's `Table` has the addresses, ranks and scales
of its matrices, and the `RowTiles` of a batch say which rows have which table. So a launch over tiles whose memory
stays where it is can be recorded once, and replayed for any adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.source import Variant, parameter_dtype
from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights, Delta

SOURCE = "lora.cu"
THREADS = 128
ROWS, RANKS, COLUMNS = 8, 4, 256
"""Rows of a tile, at most; ranks, and outputs, that a block computes at a time. As in lora.cu."""
BLOCKS = 8
"""Blocks of the grid for each multiprocessor, at most; fewer where there is less work."""


@functools.cache
def variant(kernel: str, dtype: torch.dtype) -> Variant:
    """One of the kernels, "Shrink" or "Expand", which are also the names of their parameters."""
    return Variant(SOURCE, f"lora_{kernel.lower()}<{DTYPES[dtype]}>", kernel)


def variants(*dtypes: torch.dtype) -> list[Variant]:
    """Both kernels for each dtype; by default for all."""
    return [variant(kernel, dtype) for dtype in dtypes or DTYPES for kernel in ("Shrink", "Expand")]


class Table:
    """What an adapter changes, as the kernels read it from the device's memory.

    memory: int64, see lora.cu. It has the addresses of the adapter's matrices, which must live as long as it does.
    width: the most ranks that a product has together, at least 1. products: those that the kernels change.
    others: products that PyTorch changes: a weight in the place of the model's, or sizes that have no kernel.
    """

    def __init__(self, adapter: AdapterWeights, device: torch.device) -> None:
        changed = [number for number, deltas in enumerate(adapter.products) if deltas]
        self.products = frozenset(
            number for number in changed if _serves(adapter.products[number], adapter.shapes[number][1])
        )
        self.others = frozenset(changed) - self.products
        served = [deltas if number in self.products else () for number, deltas in enumerate(adapter.products)]
        self.width = max([1, *(sum(len(delta.a) for delta in deltas) for deltas in served)])
        starts = np.cumsum([0, *(len(deltas) for deltas in served)])
        deltas = [_fields(delta, adapter.dtype) for own in served for delta in own]
        structs = np.array(deltas, parameter_dtype(SOURCE, "Delta"))
        host = np.concatenate([starts.astype(np.int64), structs.view(np.int64)])
        self.memory = torch.from_numpy(host).to(device)


def _serves(deltas: Sequence[Delta], num_in: int) -> bool:
    """True if the kernels have these changes of a product. Blocks change them side by side, so they lie apart."""
    spans = sorted((delta.first, delta.first + delta.num_out) for delta in deltas)
    apart = all(before[1] <= behind[0] for before, behind in pairwise(spans))
    aligned = all(tensor.data_ptr() % 16 == 0 for delta in deltas for tensor in delta.tensors[:2])
    return num_in % 8 == 0 and apart and aligned and all(delta.b is not None for delta in deltas)


def _fields(delta: Delta, dtype: torch.dtype) -> tuple[Any, ...]:
    """The struct of a change, in the order of its fields; dtype: of the product."""
    tensors = (delta.a, delta.b, delta.gain, delta.shift)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    sizes = (len(delta.a), delta.first, delta.num_out)
    return (*addresses, *sizes, int(delta.a.dtype != dtype), delta.scale)


def table_of(adapter: AdapterWeights, device: torch.device) -> Table:
    """The table of an adapter, made at the first use, which waits for the copy to the device."""
    if adapter.table is None:
        adapter.table = Table(adapter, device)
    table: Table = adapter.table
    return table


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The rows of a batch that have adapters, in tiles of up to `ROWS` rows of one adapter, on a device."""

    memory: Tensor
    """int64 [3 * capacity + 1]: for each tile its table's address, then where its rows begin, and then the rows."""
    capacity: int
    """Rows that the memory is for."""
    num_rows: int
    """Rows that a launch is for, at most; `capacity` or fewer."""
    num_tiles: int
    """Tiles that a launch is for, at most. One without rows costs little."""

    @classmethod
    def of(cls, rows: AdapterRows, device: torch.device) -> RowTiles:
        """The tiles of a batch. The host does not wait for the device."""
        host, num_tiles = _tiles(rows, len(rows.rows), device)
        memory = _pinned(host, device).to(device, non_blocking=True)
        return cls(memory, len(rows.rows), len(rows.rows), num_tiles)

    @classmethod
    def reserve(cls, capacity: int, device: torch.device) -> RowTiles:
        """Memory for tiles of later batches; until then there are no rows in them."""
        memory = torch.zeros(3 * capacity + 1, dtype=torch.int64, device=device)
        return cls(memory, capacity, capacity, capacity)

    def first(self, num_rows: int) -> RowTiles:
        """The same memory for launches over at most `num_rows` rows."""
        return replace(self, num_rows=num_rows, num_tiles=num_rows)

    def fill(self, rows: AdapterRows) -> None:
        """Write the tiles of a batch to the memory, behind all work that was launched.

        Raises:
            ValueError: there are more rows than it is for.
        """
        if len(rows.rows) > self.capacity:
            raise ValueError(f"{len(rows.rows)} rows with adapters, and memory for {self.capacity}")
        host, _ = _tiles(rows, self.capacity, self.memory.device)
        self.memory.copy_(_pinned(host, self.memory.device), non_blocking=True)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The parts of the memory, by their names in lora.cu."""
        tables, starts, rows = torch.split(self.memory, [self.capacity, self.capacity + 1, self.capacity])
        return {"tables": tables, "starts": starts, "rows": rows}


def _tiles(rows: AdapterRows, capacity: int, device: torch.device) -> tuple[Tensor, int]:
    """`RowTiles.memory` on the host, and the number of tiles.

    Raises:
        ValueError: see `AdapterRows.check_indices`.
    """
    rows.check_indices()
    addresses: list[int] = []
    firsts: list[int] = []
    for adapter, (start, stop) in zip(rows.adapters, pairwise(rows.starts.tolist()), strict=True):
        firsts += range(start, stop, ROWS)
        addresses += [table_of(adapter, device).memory.data_ptr()] * (len(firsts) - len(addresses))
    memory = np.zeros(3 * capacity + 1, np.int64)
    tables, starts, ordered = np.split(memory, [capacity, 2 * capacity + 1])
    tables[: len(addresses)] = addresses
    starts[: len(firsts)] = firsts
    starts[len(firsts) :] = len(rows.rows)
    ordered[: len(rows.rows)] = rows.rows.numpy()
    return torch.from_numpy(memory), len(firsts)


def _pinned(host: Tensor, device: torch.device) -> Tensor:
    """Memory that a device reads on its own. PyTorch keeps it until then."""
    return host if device.type == "cpu" else host.pin_memory()


@dataclass(slots=True)
class DeviceRows:
    """The rows of a batch that have adapters, as the kernels take them: `AdapterRows.native`."""

    width: int
    """The most ranks that a product has together, of any adapter."""
    products: frozenset[int] | None
    """The products that the kernels change in some rows; None: whichever the tables say."""
    others: frozenset[int]
    """The products that PyTorch changes in some rows."""
    tiles: RowTiles | None
    """None until a kernel needs them."""

    @classmethod
    def of(cls, rows: AdapterRows, device: torch.device) -> DeviceRows:
        """Those of a batch."""
        tables = [table_of(adapter, device) for adapter in rows.adapters]
        products, others = (
            frozenset[int]().union(*sets)
            for sets in ([table.products for table in tables], [table.others for table in tables])
        )
        return cls(max(table.width for table in tables), products, others, None)

    @classmethod
    def recorded(cls, tiles: RowTiles, width: int) -> DeviceRows:
        """Rows whose launches are recorded: what `tiles` holds at a replay counts.

        width: of all adapters that come. The kernels change every product of theirs that is recorded.
        """
        return cls(width, None, frozenset(), tiles)


def adapt(
    launcher: KernelLauncher, x: Tensor, out: Tensor, rows: AdapterRows, product: int
) -> AdapterRows | None:
    """See `pagewire.kernels.adapted.adapt`. Sums are float32, and each has one order whatever the batch.

    Args:
        x: bfloat16 or float16.

    Returns:
        the rows whose adapters change the product in a way that the kernels do not have; None if there are none.

    Raises:
        TypeError: another dtype.
        ValueError: the rows are those of a grouped product, or see `AdapterRows.check_indices`.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"adapt: bfloat16 or float16, not {x.dtype}")
    if rows.num_matrices != 1:
        raise ValueError("adapt: no kernel for grouped products")
    if rows.native is None:
        rows.native = DeviceRows.of(rows, x.device)
    own: DeviceRows = rows.native
    if own.products is None or product in own.products:
        if own.tiles is None:
            own.tiles = RowTiles.of(rows, x.device)
        if own.tiles.num_tiles:
            _launch(launcher, x, out, own.tiles, own.width, product, len(rows.adapters[0].shapes))
    if product not in own.others:
        return None
    return rows.of({adapter for adapter in rows.adapters if product in table_of(adapter, x.device).others})


def _launch(
    launcher: KernelLauncher,
    x: Tensor,
    out: Tensor,
    tiles: RowTiles,
    width: int,
    product: int,
    num_products: int,
) -> None:
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    low = torch.empty(tiles.num_rows, width, dtype=torch.float32, device=x.device)
    sizes = {"width": width, "product": product, "num_products": num_products}
    fields: dict[str, Any] = {**tiles.parts, **sizes, "low": low}
    shrink, expand = variant("Shrink", x.dtype), variant("Expand", x.dtype)
    blocks = -(-BLOCKS * launcher.multiprocessors // tiles.num_tiles)  # that share the work of a tile
    parameters = pack(shrink, x=x, x_stride=x.stride(0), k=x.shape[1], **fields)
    grid = (tiles.num_tiles, min(blocks, -(-width // RANKS)))
    launcher.launch(shrink, grid, (THREADS,), parameters)
    parameters = pack(expand, out=out, n=out.shape[1], **fields)
    grid = (tiles.num_tiles, min(blocks, -(-out.shape[1] // COLUMNS)))
    launcher.launch(expand, grid, (THREADS,), parameters)
