"""The CPU as a device: threads and memory. It is synchronous: every call returns with its work done."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from pagewire.ipc.host.heap import release_spare_memory
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cpu.memory import populate, zeros
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.kv_codes import CODES
from pagewire.workers.device.interface import KernelNeeds, LoadedSizes
from pagewire.workers.device.kv_size import kv_budget, step_bytes
from pagewire.workers.device.machine import ALONE, BIND, bound_cpus, default_threads, machine_memory
from pagewire.workers.errors import LoadError
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.sampler import SampleOutput, SamplingSlot, sample

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


@dataclass(frozen=True)
class CpuEvent:
    """A timestamp as an `interface.Event`: the CPU's work is done when the call returns."""

    seconds: float

    def reached(self) -> bool:
        """True: the work is done already."""
        return True

    def wait(self) -> None:
        """Return at once."""

    def seconds_since(self, earlier: CpuEvent) -> float:
        """See `Event.seconds_since`."""
        return self.seconds - earlier.seconds


@dataclass(frozen=True)
class CpuPendingTokens:
    """Tokens as `interface.PendingTokens` that are known already; they are never pending."""

    output: SampleOutput

    @property
    def token_ids(self) -> Tensor:
        """See `PendingTokens.token_ids`."""
        return torch.tensor(self.output.token_ids)

    def reached(self) -> bool:
        """True: the work is done already."""
        return True

    def finish(self) -> SampleOutput:
        """The tokens."""
        return self.output


class CpuTokenSampler:
    """`sampler.sample` as a `TokenSampler`. Logits of another device are copied to the CPU first."""

    def launch(self, logits: Tensor, slots: Sequence[SamplingSlot], masks: TokenMasks) -> CpuPendingTokens:
        """See `TokenSampler.launch`."""
        return CpuPendingTokens(sample(logits.cpu(), slots, masks))


class CpuDevice:
    """The CPU; methods as in `interface.Device`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    asynchronous = False
    batch_invariant = True
    plan = None
    activities = (torch.profiler.ProfilerActivity.CPU,)

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads

    @classmethod
    def open(cls, num_threads: int | None, parallel: Parallel = ALONE) -> CpuDevice:
        """Configure threads and the memory allocator of this process. parallel: the place of this worker.

        Raises:
            LoadError: the thread binding is invalid.
        """
        keep_memory()
        num_threads = bind_threads(num_threads, parallel)
        torch.set_num_threads(num_threads)
        return cls(num_threads)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Device.zeros`."""
        return zeros(shape, dtype)

    def populate(self, tensor: Tensor) -> bool:
        """See `Device.populate`."""
        return populate(tensor)

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """See `Device.kv_dtypes`."""
        return (dtype, *CODES) if dtype in DTYPES else (dtype,)

    def prepare(self, needs: KernelNeeds) -> None:
        """Nothing to do: the CPU's kernels are compiled at first use."""

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors themselves, which are on this device already."""
        return list(tensors)

    def pinned(self, num_bytes: int) -> Tensor:
        """See `Device.pinned`: any memory of a CPU is its own."""
        return zeros((num_bytes,), torch.uint8)

    def record_event(self) -> CpuEvent:
        """The current time."""
        return CpuEvent(time.monotonic())

    def sampler(self, max_rows: int, vocab_size: int, max_most_likely: int) -> CpuTokenSampler:
        """See `Device.sampler`."""
        return CpuTokenSampler()

    def can_record(self, dtype: torch.dtype) -> bool:
        """False: the CPU has no graphs."""
        return False

    def why_it_waits(self, work: Callable[[], object]) -> str | None:
        """See `Device.why_it_waits`: all work is done when its call returns."""
        return "a CPU's work is waited for"

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Device.record`."""
        return work

    def kv_budget(self, config: WorkerConfig, loaded: LoadedSizes, widest_step: Callable[[], object]) -> int:
        """See `Device.kv_budget`."""
        available = machine_memory(config.parallel.local_size)[1]
        return kv_budget(config, available, step_bytes(config, loaded.vocab_size))

    def give_back(self) -> None:
        """See `Device.give_back`: what malloc has kept; all else the system has already."""
        release_spare_memory()

    def memory(self) -> dict[str, int]:
        """See `Device.memory`."""
        total, available = machine_memory()
        return {"total": total, "available": available, "process": psutil.Process().memory_info().rss}


def keep_memory() -> None:
    """Make malloc keep freed memory, since every step allocates the same megabytes again.

    Memory returned to the system comes back as new pages, which are zeroed and mapped one by one. That took a
    quarter of a step of 2,048 tokens with a model of 300 million parameters.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def bind_threads(num_threads: int | None, parallel: Parallel = ALONE) -> int:
    """The number of threads; binds them to the CPUs that `PAGEWIRE_CPU_OMP_THREADS_BIND` gives this worker, if set.

    Raises:
        LoadError: the variable is malformed, or lists CPUs that this process may not use.
    """
    cpus = bound_cpus(parallel)
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            raise LoadError(f"{BIND}={os.environ[BIND]!r}: {error}") from error
    return num_threads or default_threads(parallel)
