"""Where the parts run: on a GPU, or rehearsed on the emulated device of the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.kernels.case import Extent
from pagewire.kernels.cuda import attention, indexing, latents, linear, norms
from pagewire.kernels.cuda import kernels as cuda_kernels
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.launch import HOPPER
from pagewire.kernels.cuda.limits import LATENTS
from pagewire.kernels.cuda.trial import Trial, short
from pagewire.kernels.cuda.trials import trials
from pagewire.kernels.cuda.variants import Launches
from pagewire.workers.device.cuda import CudaDevice

REHEARSED = (
    " of 248",
    "groups of 64, scales in float16",
    "8-bit floats, groups of 64",
    "dense weights",
    "delta rule of 14",
    "convolution by 4 in bfloat16",
)
"""Ends of names. Where a method has many trials, a rehearsal runs only those whose name ends so."""
KV_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Place(Protocol):
    """What the parts ask of the device."""

    device: torch.device
    extent: Extent
    """How much the kernels are measured."""
    is_gpu: bool

    def kernels(self) -> CudaKernels:
        """The kernels of the device."""

    def worker_device(self) -> CudaDevice:
        """The device as a worker uses it."""

    def trials(self) -> Iterator[tuple[str, Trial]]:
        """All trials, each with the name of its launches."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """A graph of `run`: its result, and a replay that writes it again."""

    def other_stream(self) -> AbstractContextManager[Any]:
        """A context in which work goes to another stream."""


class Gpu:
    """The first GPU of this machine."""

    device, extent, is_gpu = torch.device("cuda", 0), Extent.QUICK, True

    def kernels(self) -> CudaKernels:
        """See `Place`."""
        torch.cuda.set_device(0)
        return cuda_kernels.load(0)

    def worker_device(self) -> CudaDevice:
        """See `Place`."""
        return CudaDevice.open(0)

    def trials(self) -> Iterator[tuple[str, Trial]]:
        """See `Place`: those of every dtype, cache, head size and size of latents."""
        seen, capability = set(), torch.cuda.get_device_capability(0)
        for dtype in norms.DTYPES:
            for head_dim in (*attention.HEAD_DIMS, *LATENTS):
                for kv_dtype in KV_DTYPES:
                    for encodes in (False, True):
                        kinds = (encodes, not encodes, not encodes)
                        launches = Launches(
                            dtype, kv_dtype, head_dim, *kinds, capability=capability, indexed=not encodes
                        )
                        others = launches._replace(packed=False, invariant=True)
                        for trial in (*trials(launches), *([] if encodes else trials(others))):
                            if (dtype, trial.name) not in seen:
                                seen.add((dtype, trial.name))
                                yield short(dtype), trial

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """See `Place`."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
        return result, graph.replay

    def other_stream(self) -> AbstractContextManager[Any]:
        """See `Place`."""
        return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


class Rehearsal:
    """The emulated device, which runs the parts at small sizes."""

    device, extent, is_gpu = torch.device("cpu"), Extent.SMALL, False

    def kernels(self) -> CudaKernels:
        """See `Place`."""
        from tests.kernels.cuda.emulate import EmulatedLauncher

        return CudaKernels(EmulatedLauncher(), "cpu")

    def worker_device(self) -> CudaDevice:
        """See `Place`."""
        from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice

        return EmulatedCudaDevice()

    def trials(self) -> Iterator[tuple[str, Trial]]:
        """See `Place`: few, for each kernel has to be compiled for the emulation."""
        launches = Launches(
            torch.bfloat16, torch.bfloat16, 64, recurrent=True, mixture=True, capability=HOPPER
        )
        others = [
            trial for trial in trials(launches._replace(packed=False, invariant=True)) if "any" in trial.name
        ]
        for trial in (*trials(launches), *others):
            many = ("pack", "experts", linear.FEWEST, linear.UNPACKED, "states")
            if trial.name.endswith(REHEARSED) or not trial.method.endswith(("norm", *many)):
                yield "bfloat16", trial
        for trial in trials(Launches(torch.bfloat16, torch.bfloat16, min(LATENTS), indexed=True)):
            if trial.method in (latents.METHOD, indexing.METHOD):
                yield "bfloat16", trial

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """See `Place`."""
        result = run()
        return result, lambda: result.copy_(run())

    def other_stream(self) -> AbstractContextManager[Any]:
        """See `Place`."""
        return nullcontext()
