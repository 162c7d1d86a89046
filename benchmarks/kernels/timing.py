"""How long a case takes, what the device can do at most, and what Python adds to a launch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from pagewire.kernels.cuda import norms
from pagewire.kernels.cuda.launch import KernelLauncher

from .case import Case, Run


def seconds(run: Run, copies: int, replays: int = 20) -> float:
    """Of one call: the median over replays of a graph of at least 10 calls. On an emulated device: of one call."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run(0)
        return time.perf_counter() - start
    calls = max(10, copies)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # loads kernels, fills caches of the allocator
        for i in range(3):
            run(i % copies)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            run(i % copies)
    times = []
    for replay in range(replays + 2):
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        begin, end = events
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) / 1000 / calls)
    return float(statistics.median(times))


def floors(on: str) -> tuple[float, float]:
    """Bytes per second of a copy (read and written), and operations per second of a bf16 product.

    The copy is a kernel's: the copies of graphs are slower than the memory.
    """
    numbers, width = (1 << 29, 8192) if torch.cuda.is_available() else (1 << 16, 64)
    source = torch.randn(numbers, device=on).bfloat16()
    target = torch.empty_like(source)
    copying = seconds(lambda i: torch.neg(source, out=target), 1)
    a, b = (torch.randn(width, width, device=on).bfloat16() for _ in range(2))
    return 2 * source.nbytes / copying, 2 * width**3 / seconds(lambda i: a @ b, 1)


def launch_overhead(launcher: KernelLauncher, on: str) -> dict[str, float]:
    """Seconds that Python takes for a launch of ours, and for one of PyTorch's."""
    if not torch.cuda.is_available():
        return {}  # an emulated device has run the kernel when the launch returns
    calls = 2000
    x = torch.randn(1, 4096, device=on).bfloat16()
    weight, out = torch.ones(4096, device=on).bfloat16(), torch.empty_like(x)
    result = {}
    runs: dict[str, Callable[[], object]] = {
        "rms_norm": lambda: norms.rms_norm(launcher, x, weight, 1e-6, out=out),
        "torch add": lambda: torch.add(x, x, out=out),
    }
    for name, run in runs.items():
        for _ in range(100):
            run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        result[name] = (time.perf_counter() - begin) / calls
        torch.cuda.synchronize()
    return result


def measure(case: Case, bandwidth: float, rate: float) -> dict[str, Any]:
    """Time a case and its peers."""
    taken = seconds(case.run, case.copies)
    row: dict[str, Any] = {
        "us": taken * 1e6,
        "TB/s": case.num_bytes / taken / 1e12,
        "TFLOP/s": case.flops / taken / 1e12,
        "of_floor": max(case.num_bytes / bandwidth, case.flops / rate) / taken,
    }
    for name, run in case.peers.items():
        try:
            row[f"{name}_us"] = seconds(run, case.copies) * 1e6
        except (RuntimeError, ValueError) as error:  # a peer that cannot is told of, and stops nobody
            row[f"{name}_error"] = str(error).splitlines()[0][:200]
    return row
