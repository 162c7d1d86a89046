"""Compares the code that two compilers make of the CPU kernels: `python -m benchmarks.compilers COMPILER COMPILER`.

    python -m benchmarks.compilers g++ "python -m ziglang c++ -target x86_64-linux-gnu.2.28"

Each kernel runs from both libraries in turn, a few calls at a time, in one process and on the same numbers. A row
has the median time of a call with the first compiler, the median of the ratios of neighbours (above 1: the second
is slower) and the quartiles of these. Results must be equal to the bit. Compiling takes minutes, once for each.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.kernels_cpu import CASES, SCHEMES, Case, packed_copies, paged_call
from benchmarks.limits import processor
from pagewire.kernels import linear
from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu.build import InstructionSet, supported_instruction_sets
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.library import open_library
from pagewire.kernels.data.integers import quantise

Call = Callable[[], Tensor]
ROWS = (1, 8, 32, 512)
SIZES = ((5632, 1024), (2048, 8192))
QUANTISED = ("int8/32", "int4/32", "int4/128")
LEAST_SECONDS = 0.004  # of the calls between two looks at the clock
PAUSE_SECONDS = 0.001  # the threads of the other library sleep by then


def compiled_by(compiler: str, isa: InstructionSet) -> CpuKernels:
    """The kernels for an instruction set, compiled by a command.

    Raises:
        BuildError: see `build`.
    """
    before = os.environ.get("CXX")
    os.environ["CXX"] = compiler
    try:
        return CpuKernels(isa, open_library(isa))
    finally:
        os.environ.pop("CXX")
        if before is not None:
            os.environ["CXX"] = before


def serve(kernels: CpuKernels) -> None:
    """Make these the kernels that the public functions of this process call."""
    cpu_kernels.load = lambda: kernels  # type: ignore[assignment]


def products(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
    """Products of rows with dense and quantised matrices: a name, and a function that makes the calls."""
    for size in SIZES:
        dense = linear.dense_weight(torch.randn(size).to(dtype))
        weights = {"dense": dense} | {name: quantise(dense, SCHEMES[name]) for name in QUANTISED}
        for name, weight in weights.items():
            for num_rows in ROWS:
                x = torch.randn(num_rows, size[1]).to(dtype)

                def calls(weight: linear.Weight = weight, x: Tensor = x) -> list[Call]:
                    return [functools.partial(product, x) for product in packed_copies(weight)]

                yield f"{name}, {num_rows} x [{size[0]:,}, {size[1]:,}]", calls


def attention(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
    """Attention over paged caches of a dtype and of 8-bit codes, as `products`."""
    for case in CASES:
        for kept in (dtype, torch.int8):

            def calls(case: Case = case, kept: torch.dtype = kept) -> list[Call]:
                torch.manual_seed(0)
                return [paged_call(case, dtype, kept)]  # type: ignore[list-item]

            yield f"{case.name}, {str(kept).removeprefix('torch.')}", calls


def timed(calls: list[Call], count: int) -> float:
    """The seconds of one of `count` calls, going round the list."""
    time.sleep(PAUSE_SECONDS)
    begin = time.perf_counter()
    for index in range(count):
        calls[index % len(calls)]()
    return (time.perf_counter() - begin) / count


def compare(
    make: Callable[[], list[Call]], both: tuple[CpuKernels, CpuKernels], seconds: float
) -> list[float]:
    """The median seconds of the first, and median, lower and upper quartile of the second's ratio to it.

    Raises:
        ValueError: their results differ.
    """
    each: list[list[Call]] = []
    for kernels in both:
        serve(kernels)
        each.append(make())
    results = []
    for kernels, calls in zip(both, each, strict=True):
        serve(kernels)
        results.append(calls[0]())
    if not torch.equal(*results):
        raise ValueError("the results of the two compilers differ")
    serve(both[0])
    count = max(1, round(LEAST_SECONDS / timed(each[0], 3)))
    firsts, ratios = [], []
    deadline = time.perf_counter() + seconds
    while len(ratios) < 5 or time.perf_counter() < deadline:
        times = [0.0, 0.0]
        for index in (0, 1) if len(ratios) % 2 else (1, 0):
            serve(both[index])
            times[index] = timed(each[index], count)
        firsts.append(times[0])
        ratios.append(times[1] / times[0])
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    return [statistics.median(firsts), middle, lower, upper]


def main() -> None:
    """Compile with both, and compare each kernel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("compilers", nargs=2, metavar="COMPILER")
    parser.add_argument("--isa", help="the instruction set (default: the best of this CPU)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=2.0, help="per kernel")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sets = {isa.name: isa for isa in supported_instruction_sets()}
    if options.isa and options.isa not in sets:
        sys.exit(f"this CPU has {', '.join(sets)}")
    isa = sets[options.isa or next(iter(sets))]
    dtype: torch.dtype = getattr(torch, options.dtype)
    both = compiled_by(options.compilers[0], isa), compiled_by(options.compilers[1], isa)
    load = os.getloadavg()[0]
    print(f"{processor()}; {isa.name}, {options.dtype}, {options.threads} threads, load {load:.1f}")
    print(f"{'kernel':44}{'ms':>9}{'ratio':>8}{'quartiles':>16}")
    ratios = []
    for group in (products, attention):
        for name, make in group(dtype):
            if options.only not in name:
                continue
            took, ratio, lower, upper = compare(make, both, options.seconds)
            ratios.append(ratio)
            print(f"{name:44}{took * 1e3:9.3f}{ratio:8.3f}{lower:9.3f}{upper:7.3f}", flush=True)
    print(f"{'geometric mean':53}{statistics.geometric_mean(ratios):8.3f}")


if __name__ == "__main__":
    main()
