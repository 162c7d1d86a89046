"""An emulated GPU for a worker: its memory is the CPU's, and work is done when the host waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from pagewire.kernels import dispatch
from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cuda.kernels import CudaKernels, serves
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.variants import Launches
from pagewire.kernels.reference.kernels import Kernels
from pagewire.workers.device.cuda import CudaDevice
from pagewire.workers.device.gpu_memory import CONTEXT_BYTES, attention_scratch
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.peak import TensorPeak
from tests.kernels.cuda.emulate.tape import Tape


class LateEvent:
    """An event that is reached only when the host waits for it or for a later one: as late as a device may be.

    events: all events of the device, in order. work: runs when this event is reached.
    """

    def __init__(self, events: list[LateEvent], work: Callable[[], object] = lambda: None) -> None:
        self._events, self._work, self._done = events, work, False
        events.append(self)

    def reached(self) -> bool:
        return self._done

    def wait(self) -> None:
        while not self._done:
            event = self._events.pop(0)
            event._work()
            event._done = True

    def seconds_since(self, earlier: LateEvent) -> float:
        assert self._done and earlier._done
        return 0.0


class EmulatedCudaDevice(CudaDevice):
    """A `CudaDevice` without the calls that need a GPU.

    total_bytes, other_bytes, torch_bytes: of its memory, what other processes hold, and what torch does.
    """

    total_bytes, other_bytes, torch_bytes = 4 << 30, 0, 0

    def __init__(self, launcher: EmulatedLauncher | None = None) -> None:
        self.name, self.torch_device = "cuda:0", torch.device("cpu")
        self.launcher = launcher or EmulatedLauncher()
        self.kernels = CudaKernels(self.launcher, "cpu")
        self.num_threads = 1
        self.num_recorded = self.num_replayed = self._graphs = 0
        self._scratch = attention_scratch(self.launcher.multiprocessors)
        self.plan = None
        self._beside_torch = self._used_beside_torch()
        self._events: list[LateEvent] = []

    def try_kernels(self, launches: Launches) -> None:
        """Nothing to do: the tests of the kernels prove more."""

    def download(self, source: Tensor, target: Tensor) -> LateEvent:
        """The copy has the source's values at the time of the call, and arrives as late as possible."""
        values = source.clone()
        target.fill_(255)
        return LateEvent(self._events, lambda: target.copy_(values))

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_event(self) -> LateEvent:
        return LateEvent(self._events)

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A replay of the operations and launches of `work`, as a CUDA graph is one."""
        work()
        tape = Tape()
        result = tape.record(work)
        self.num_recorded += 1

        def replay() -> Tensor:
            self.num_replayed += 1
            tape.replay()
            return result

        return replay

    def give_back(self) -> None:
        """Nothing to do: the emulation keeps no unused memory."""

    def _activations_of(self, step: Callable[[], object]) -> int:
        with TensorPeak() as peak:
            step()
        return peak.most

    @contextmanager
    def _refusing_waits(self) -> Iterator[None]:
        yield

    def _free_and_total(self) -> tuple[int, int]:
        return self.total_bytes - self.other_bytes - CONTEXT_BYTES - self.torch_bytes, self.total_bytes

    def _torch_bytes(self) -> int:
        return self.torch_bytes


@contextmanager
def emulated(kernels: EmulatedLauncher | CudaKernels) -> Iterator[None]:
    """A context in which the CUDA kernels compute on CPU tensors of the dtypes that they support."""
    if isinstance(kernels, EmulatedLauncher):
        kernels = CudaKernels(kernels, "cpu")
    for_cpu, served_on_cpus = dispatch.implementation_for, cpu_kernels.serves

    def for_cuda(*tensors: Tensor) -> Kernels:
        return kernels if tensors[0].is_cpu and serves(tensors) else for_cpu(*tensors)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # where several share an operation of PyTorch, the bits of a row depend on the others
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "implementation_for", for_cuda)  # also for keys and values of 8 bits
        patch.setattr(dispatch, "states_for", lambda first: kernels.states)
        patch.setattr(
            cpu_kernels, "serves", lambda tensors: tensors[0].dtype in DTYPES and served_on_cpus(tensors)
        )
        patch.setattr(cpu_kernels, "load", lambda: kernels)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)
