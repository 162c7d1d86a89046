"""What LoRA adapters add to a product."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagewire.kernels.cuda import lora
from pagewire.kernels.cuda.launch import KernelLauncher
from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights, Delta, panels

from .case import Case, Extent, distance, num_copies

ROWS = {Extent.FULL: (1, 64, 2048), Extent.QUICK: (64, 2048), Extent.SMALL: (1, 33)}


def lora_cases(launcher: KernelLauncher, on: str, extent: Extent) -> Iterator[Case]:
    """What adapters of rank 16 add to a square product: one for all rows, and one for each of 32 parts of them."""
    size = 72 if extent is Extent.SMALL else 4096
    for num_rows in ROWS[extent]:
        for num_adapters in {1, min(32, num_rows)}:
            yield _lora_case(launcher, on, num_rows, num_adapters, size)


def _lora_case(launcher: KernelLauncher, on: str, num_rows: int, num_adapters: int, size: int) -> Case:
    rank, device = 16, torch.device(on)
    num_bytes = 2 * (num_adapters * 2 * rank * size + 3 * num_rows * size)
    copies, share = num_copies(num_bytes), num_rows // num_adapters
    num_rows = share * num_adapters
    x, out = (torch.randn(copies, num_rows, size, device=on).bfloat16() for _ in range(2))
    a = (torch.randn(copies, num_adapters, rank, size, device=on) / size**0.5).bfloat16()
    b = torch.randn(copies, num_adapters, size, rank, device=on).bfloat16()
    indices = torch.arange(num_rows)
    starts = torch.arange(0, num_rows + 1, share)

    def adapters(i: int) -> AdapterRows:
        deltas = [Delta(a[i, n], panels(b[i, n]), 0, size, 0.5) for n in range(num_adapters)]
        weights = [AdapterWeights([[delta]], ((size, size),), torch.bfloat16) for delta in deltas]
        own = AdapterRows(indices, starts, weights, num_rows)
        own.native = lora.DeviceRows.of(own, device)
        own.native.tiles = lora.RowTiles.of(own, device)
        return own

    batches = [adapters(i) for i in range(copies)]

    def run(i: int) -> None:
        lora.adapt(launcher, x[i], out[i], batches[i], 0)

    def error() -> float:
        before = out[0].double()
        low = x[0].double().view(num_adapters, share, size) @ a[0].double().mT
        added = 0.5 * (low @ b[0].double().mT).view(num_rows, size)
        run(0)
        return distance(out[0], before + added)

    def in_torch(i: int) -> None:
        low = x[i].view(num_adapters, share, size) @ a[i].mT
        out[i] += 0.5 * (low @ b[i].mT).view(num_rows, size)

    name = f"lora {num_rows} rows of {num_adapters} adapters"
    flops = 4 * num_rows * rank * size
    return Case(name, num_bytes, flops, copies, run, error, 1e-2, {"torch": in_torch})
