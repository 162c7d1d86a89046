"""A trial of a CUDA kernel: a small run beside PyTorch, which shows whether a device computes what it should."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.reference.kernels import Kernels, reference

TOLERANCE = {
    torch.float32: 0.001,
    torch.float16: 0.02,
    torch.bfloat16: 0.05,
    torch.float8_e4m3fn: 0.15,
    torch.float8_e5m2: 0.3,
}
"""The largest `difference` of right results, by the dtype in which they are rounded: one or two units in
its last place; for fp8 one."""
Layout = Callable[[Tensor], Tensor]
"""Brings a cache from rows to the layout of an implementation, and back."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A method of the kernels on small inputs."""

    name: str
    """What is tried, for the log."""
    method: str
    """Of `Kernels`; computed by PyTorch if the trial fails. "states": all of `StateKernels`."""
    compute: Callable[[Kernels, Layout, Sequence[Tensor]], Tensor]
    """Calls the method, with copies of the inputs, which it may change. Returns its results as rows [n, any]."""
    inputs: Sequence[Tensor]
    """On the CPU."""
    tolerance: float
    records: bool = True
    """A CUDA graph can record it."""
    load: Callable[[Kernels, Sequence[Tensor]], Sequence[Any]] | None = None
    """Makes what `compute` gets in place of the inputs, as loading a model does: no graph records that."""

    def runs(self, kernels: Kernels, layout: Layout, device: torch.device) -> Callable[[], Tensor]:
        """A function that computes the method on a device, which may be called again."""
        inputs = [x.to(device) for x in self.inputs]
        if self.load is not None:
            return partial(self.compute, kernels, layout, self.load(kernels, inputs))
        return lambda: self.compute(kernels, layout, [x.clone() for x in inputs])

    @torch.inference_mode()
    def why_wrong(self, kernels: CudaKernels, device: torch.device) -> str:
        """Why the kernels cannot be relied on; empty if they give what PyTorch gives on the CPU.

        On a GPU they are also recorded in a CUDA graph and replayed, which shows a launch on another stream.
        """
        expected = self.runs(reference, lambda cache: cache, torch.device("cpu"))()
        run = self.runs(kernels, exchange_chunks, device)
        if (error := difference(run(), expected)) > self.tolerance:
            return f"differs from PyTorch by {error:.2g}"
        if device.type != "cuda" or not self.records:
            return ""
        error = difference(recorded(run), expected)
        return "" if error <= self.tolerance else f"differs from PyTorch by {error:.2g} in a CUDA graph"


def preferring(kernels: Kernels, method: str) -> Kernels:
    """The kernels with only this one of `PREFERRED`; of another method with none."""
    if isinstance(kernels, CudaKernels):
        kernels = copy.copy(kernels)
        kernels.preferred &= {method}
    return kernels


def batch_invariant(trial: Trial) -> Trial:
    """The trial of the kernels that compute so that no bit depends on the batch."""

    def compute(kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        if isinstance(kernels, CudaKernels):
            kernels = copy.copy(kernels)
            kernels.batch_invariant = True
        return trial.compute(kernels, layout, inputs)

    return replace(trial, name=f"{trial.name}, in any batch", compute=compute)


def difference(result: Tensor, expected: Tensor) -> float:
    """The largest difference of two elements, relative to the expected one and to the size of its row [n, any].

    The size is the root mean square. Where a row must be zeros, another number is infinitely wrong, and so is NaN.
    """
    result, expected = result.cpu().double(), expected.double()
    size = expected.abs() + expected.square().mean(-1, keepdim=True).sqrt()
    errors = torch.where(result == expected, 0.0, (result - expected).abs() / size)
    return float(errors.nan_to_num(math.inf, math.inf).amax())


def recorded(run: Callable[[], Tensor]) -> Tensor:
    """The result of a replayed CUDA graph of `run`, in memory that held NaN before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    result.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return result


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random float32 numbers, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def short(dtype: torch.dtype) -> str:
    """A dtype's name in the log."""
    return str(dtype).removeprefix("torch.")
