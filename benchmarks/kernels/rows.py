"""Norms and gates, row by row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pagewire.kernels.cuda import gates, norms
from pagewire.kernels.cuda.launch import KernelLauncher
from pagewire.kernels.data.layer import Activation
from pagewire.kernels.reference.kernels import reference

from .case import Case, Extent, distance, num_copies


def row_cases(launcher: KernelLauncher, on: str, extent: Extent) -> Iterator[Case]:
    """Norms of rows of 4,096, and gates of 14,336."""
    size = 4096
    for rows in (3,) if extent is Extent.SMALL else (64, 8192):
        copies = num_copies(8 * rows * size)
        x, residual = (torch.randn(copies, rows, size, device=on).bfloat16() for _ in range(2))
        weight = torch.rand(size, device=on).bfloat16() + 0.5
        yield _norm_case(launcher, f"add_rms_norm {rows} x {size}", x, residual, weight)
        yield _gate_case(launcher, rows, torch.randn(copies, rows, 28672, device=on).bfloat16())


def _norm_case(launcher: KernelLauncher, name: str, x: Tensor, residual: Tensor, weight: Tensor) -> Case:
    def error() -> float:
        total = (x[0] + residual[0]).double()
        truth = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
        return distance(norms.rms_norm(launcher, x[0], weight, 1e-6, residual=residual[0]), truth)

    return Case(
        name,
        8 * x[0].numel(),
        0,
        len(x),
        lambda i: norms.rms_norm(launcher, x[i], weight, 1e-6, residual=residual[i]),
        error,
        1e-2,
        {"torch": lambda i: reference.add_rms_norm(x[i], residual[i], weight, 1e-6)},
    )


def _gate_case(launcher: KernelLauncher, rows: int, x: Tensor) -> Case:
    def error() -> float:
        return distance(
            gates.activate_and_mul(launcher, x[0], Activation.SILU),
            reference.activate_and_mul(x[0].double(), Activation.SILU),
        )

    return Case(
        f"silu_and_mul {rows} x {x.shape[2] // 2}",
        3 * x[0].numel(),
        0,
        len(x),
        lambda i: gates.activate_and_mul(launcher, x[i], Activation.SILU),
        error,
        1e-2,
        {"torch": lambda i: reference.activate_and_mul(x[i], Activation.SILU)},
    )
