"""What this machine gives a process: memory, processors, and the rate at which memory is read. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.kernels.cpu.arena import LARGE_PAGE, Region, populate
from pagewire.workers.errors import LoadError

GPU_DRIVER = Path("/proc/driver/nvidia")
CGROUPS = Path("/sys/fs/cgroup")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
LEAST_READ_BYTES, MOST_READ_BYTES = 8 << 20, 256 << 20  # of memory that a measurement reads
READ_SECONDS = 0.15
ALONE = Parallel()
"""The place of a worker without others."""
BIND = "PAGEWIRE_CPU_OMP_THREADS_BIND"


def runs_on_cpu(device: str) -> bool:
    """True if the option `device` means the CPU here; "auto" does where there is no GPU's driver."""
    return device == "cpu" or (device == "auto" and not GPU_DRIVER.exists())


def machine_memory(num_workers: int = 1) -> tuple[int, int]:
    """(total, available) bytes for each of `num_workers`: the machine's, or the control group's where that is less.

    Cached files count as available, since the system drops them when memory is wanted.
    """
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for group in control_groups():
        limit, used = figures(group / "memory.max"), figures(group / "memory.current")
        if limit and used:
            total = min(total, limit[0])
            available = min(available, max(0, limit[0] - used[0] + cached_file_bytes(group)))
    return total // num_workers, available // num_workers


def cached_file_bytes(group: Path) -> int:
    """Bytes of a control group's memory that hold cached files, which may be dropped."""
    try:
        rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(row[1]) for row in rows if row[0] in ("inactive_file", "active_file"))
    except (OSError, ValueError, IndexError):
        return 0


def usable_cpus() -> int:
    """The number of CPUs that this process may use, by affinity and by its control groups' quotas."""
    usable = len(os.sched_getaffinity(0))
    for group in control_groups():
        quota = figures(group / "cpu.max")
        if len(quota) == 2:
            usable = min(usable, max(1, quota[0] // quota[1]))
    return usable


def default_threads(parallel: Parallel = ALONE) -> int:
    """The number of threads of a worker to which none is given: a thread for each physical core that it may use.

    Without a binding the workers of a machine share its cores evenly. parallel: the place of the worker.

    Raises:
        LoadError: see `bound_cpus`.
    """
    if (cpus := bound_cpus(parallel)) is not None:
        return len(cpus)
    usable = usable_cpus()
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable) // parallel.local_size)


def bound_cpus(parallel: Parallel = ALONE) -> set[int] | None:
    """The CPUs that `PAGEWIRE_CPU_OMP_THREADS_BIND` gives a worker; None if it gives none.

    It has a list of CPUs for each worker of a machine: "0-31|32-63".

    Raises:
        LoadError: the variable is malformed, or has fewer lists than the machine has workers.
    """
    text = os.environ.get(BIND, "auto")
    if text in ("", "auto", "all", "nobind"):
        return None
    lists = text.split("|")
    if len(lists) < parallel.local_size:
        raise LoadError(
            f"{BIND}={text!r} binds {len(lists)} workers, but this machine has {parallel.local_size}: give each a "
            "list of CPUs, separated by |"
        )
    try:
        return parse_cpus(lists[parallel.local_rank])
    except ValueError as error:
        raise LoadError(f"{BIND}={text!r}: {error}") from error


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
        raise ValueError("the list of CPUs is empty")
    return cpus


def control_groups() -> list[Path]:
    """The folders of this process's control group (version 2) and of those around it, the innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    group = CGROUPS / own.strip().lstrip("/")
    return [group, *(parent for parent in group.parents if parent == CGROUPS or CGROUPS in parent.parents)]


def figures(file: Path) -> list[int]:
    """The numbers in a file of a control group; empty where there is no such limit."""
    try:
        return [int(figure) for figure in file.read_text().split()]
    except (OSError, ValueError):
        return []


def last_level_cache_bytes() -> int:
    """The size of the largest cache of the first processor; 0 where the system does not tell."""
    sizes = [0]
    for file in CACHES.glob("index*/size"):
        try:
            sizes.append(int(file.read_text().strip().removesuffix("K")) << 10)
        except (OSError, ValueError):
            continue
    return max(sizes)


def read_rate(num_bytes: int, num_threads: int) -> float:
    """Bytes per second that `num_threads` read of memory, the best of `READ_SECONDS`; takes 0.2 seconds.

    As much memory is read as a step will read, `num_bytes`, as far as that matters: what fits into caches is read
    faster. The C library's search for a byte that is not there is the reader: vectors, and nothing else to do.

    Raises:
        OSError: there is no memory for it.
    """
    most = max(MOST_READ_BYTES // 2, min(MOST_READ_BYTES, 4 * last_level_cache_bytes()))
    size = min(max(num_bytes, LEAST_READ_BYTES), most)
    share = size // num_threads // LARGE_PAGE * LARGE_PAGE or LARGE_PAGE
    region = Region(share * num_threads)
    if not populate(region.address, region.size):
        ctypes.memset(region.address, 0, region.size)
    search = ctypes.CDLL(None).memchr
    search.restype, search.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    starts = range(region.address, region.address + region.size, share)
    seconds: list[float] = []
    with ThreadPoolExecutor(num_threads) as pool:
        end = time.perf_counter() + READ_SECONDS
        while len(seconds) < 2 or time.perf_counter() < end:
            begin = time.perf_counter()
            found = list(pool.map(lambda start: search(start, 1, share), starts))
            seconds.append(time.perf_counter() - begin)
            if any(found):
                raise OSError("fresh memory does not hold zeros")
    return region.size / min(seconds)
