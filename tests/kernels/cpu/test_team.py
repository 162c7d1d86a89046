"""The threads of a team, which share out the work of a kernel."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from pagewire.kernels.cpu.kernels import CpuKernels

TASKS = Path("/proc/self/task")


def running() -> set[str]:
    """The threads of this process."""
    return {task.name for task in TASKS.iterdir()}


def asleep(thread: str) -> bool:
    """True if a thread sleeps."""
    return (TASKS / thread / "stat").read_text().rpartition(")")[2].split()[0] == "S"


def wait_until_asleep(threads: set[str]) -> None:
    """Until all threads sleep; no event says so."""
    until = time.monotonic() + 30
    while not all(map(asleep, threads)):
        assert time.monotonic() < until
        time.sleep(1e-4)


def test_a_thread_that_was_woken_elsewhere_may_run_everywhere_again(best_kernels: CpuKernels) -> None:
    """The caller moves from processor to processor, so it also wakes threads where they fell asleep."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one processor")
    x, weight, threads = torch.randn(4096, 64), torch.ones(64), torch.get_num_threads()
    torch.set_num_threads(2)
    before = running()
    expected = best_kernels.rms_norm(x, weight, 1e-6)
    team = running() - before or before - {str(os.getpid())}
    try:
        for turn in range(40):
            wait_until_asleep(team)
            os.sched_setaffinity(0, {sorted(allowed)[turn % 2]})
            assert torch.equal(best_kernels.rms_norm(x, weight, 1e-6), expected)
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)
    wait_until_asleep(team)
    assert all(os.sched_getaffinity(int(thread)) >= allowed for thread in team)
