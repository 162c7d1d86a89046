"""A GPU as a worker sees it, emulated: its memory is the CPU's, and what it does is done when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from pagewire.ipc.messages import WorkerConfig
from pagewire.kernels import dispatch
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.workers.device.cuda import Cuda
from tests.kernels.cuda.emulate.device import EmulatedDevice


class Arrival:
    """A point that is reached when it, or a later one, is waited for: as late as a device may be.

    points: all of the device, in order. work: what is seen to be done then.
    """

    def __init__(self, points: list[Arrival], work: Callable[[], object] = lambda: None) -> None:
        self._points, self._work, self._done = points, work, False
        points.append(self)

    def reached(self) -> bool:
        return self._done

    def wait(self) -> None:
        while not self._done:
            point = self._points.pop(0)
            point._work()
            point._done = True

    def seconds_since(self, earlier: Arrival) -> float:
        assert self._done and earlier._done
        return 0.0


class EmulatedCuda(Cuda):
    """`Cuda` but for the calls that need a device."""

    def __init__(self, kernels: EmulatedDevice | None = None) -> None:
        self.name, self.torch_device = "cuda:0", torch.device("cpu")
        self.kernels = kernels or EmulatedDevice()
        self.num_threads = 1
        self.num_recorded = self.num_replayed = 0
        self._points: list[Arrival] = []

    def download(self, source: Tensor, target: Tensor) -> Arrival:
        """What is downloaded is what lay there at the time of the call, but it comes late."""
        there = source.clone()
        target.fill_(255)
        return Arrival(self._points, lambda: target.copy_(there))

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_event(self) -> Arrival:
        return Arrival(self._points)

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Runs it again, into the same tensor."""
        result = work()
        self.num_recorded += 1

        def replay() -> Tensor:
            self.num_replayed += 1
            return result.copy_(work())

        return replay

    def kv_budget(self, config: WorkerConfig, vocab_size: int, widest_step: Callable[[], object]) -> int:
        widest_step()
        return 0

    def give_back(self) -> None:
        """Nothing is kept."""

    def memory(self) -> dict[str, int]:
        return {"total": 1 << 30, "available": 1 << 30, "process": 0}


@contextmanager
def emulated(kernels: EmulatedDevice) -> Iterator[None]:
    """Within, tensors of the CPU are served by the CUDA kernels, where those serve their dtype."""
    found = CudaKernels(kernels, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "DTYPES", tuple(DTYPES))
        patch.setattr(dispatch.cpu_kernels, "load", lambda: found)
        yield
