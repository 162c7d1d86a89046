"""The one seam between devices: threads, memory and where tensors lie."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from pagewire.kernels.cpu.memory import populate, zeros
from pagewire.workers.errors import LoadError

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
POPULATED = 1 << 30  # bytes of KV memory


@dataclass(frozen=True)
class Device:
    """Where the model runs."""

    name: str
    torch_device: torch.device
    num_threads: int = 1

    @classmethod
    def open(cls, name: str, num_threads: int | None) -> Device:
        """Take the device and its threads.

        Raises:
            LoadError: a device that is not served, or a bad thread binding.
        """
        if name != "cpu":
            raise LoadError(f"device {name!r} is not supported yet: only 'cpu' is")
        keep_memory()
        num_threads = bind_threads(num_threads)
        torch.set_num_threads(num_threads)
        return cls("cpu", torch.device("cpu"), num_threads)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros in memory of its own.

        Raises:
            OSError: there is not so much memory.
        """
        return zeros(shape, dtype)

    def populate(self, tensors: Sequence[torch.Tensor]) -> None:
        """Prepare tensors of zeros, in idle time, for being written from their beginnings on."""
        populate(tensors, POPULATED)

    def memory(self) -> dict[str, int]:
        """Bytes: of the device, free on it, and taken by this process."""
        total, available = machine_memory()
        return {"total": total, "available": available, "process": psutil.Process().memory_info().rss}


CPU = Device("cpu", torch.device("cpu"))


def keep_memory() -> None:
    """Tell the C library to keep what is freed: every step takes the same megabytes again.

    Given back to the system, they would come as new pages, zeroed and mapped one by one: a quarter of the time
    of a step of 2,048 tokens of a model of 300 million parameters.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def bind_threads(num_threads: int | None) -> int:
    """How many threads to use; `PAGEWIRE_CPU_OMP_THREADS_BIND` ("0-3,8") also says on which CPUs.

    Raises:
        LoadError: the variable is malformed, or names CPUs this process may not use.
    """
    text = os.environ.get("PAGEWIRE_CPU_OMP_THREADS_BIND", "auto")
    if text in ("", "auto", "all", "nobind"):
        usable = min(len(os.sched_getaffinity(0)), cgroup_cpus())
        return num_threads or max(1, min(usable, psutil.cpu_count(logical=False) or usable))
    try:
        cpus = parse_cpus(text)
        os.sched_setaffinity(0, cpus)
    except (ValueError, OSError) as error:
        raise LoadError(f"PAGEWIRE_CPU_OMP_THREADS_BIND={text!r}: {error}") from error
    return num_threads or len(cpus)


def parse_cpus(text: str) -> set[int]:
    """The CPUs in a list such as "0-3,8".

    Raises:
        ValueError: not such a list.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    if not cpus:
        raise ValueError("it names no CPU")
    return cpus


def machine_memory() -> tuple[int, int]:
    """(total, available) bytes: the machine's, or the control group's where that is less."""
    memory = psutil.virtual_memory()
    limit, used = cgroup_figures("memory.max"), cgroup_figures("memory.current")
    if not limit or not used:
        return memory.total, memory.available
    return min(memory.total, limit[0]), min(memory.available, max(0, limit[0] - used[0]))


def cgroup_cpus() -> int:
    """How many CPUs' time this process may use."""
    quota = cgroup_figures("cpu.max")
    return max(1, quota[0] // quota[1]) if len(quota) == 2 else os.cpu_count() or 1


def cgroup_figures(name: str) -> list[int]:
    """The numbers in a file of this process's control group (version 2); empty: there is no such limit."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        return [int(figure) for figure in (Path("/sys/fs/cgroup") / group / name).read_text().split()]
    except (OSError, ValueError):
        return []
