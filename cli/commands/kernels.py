"""`pagewire kernels build`: compiles the CUDA kernels ahead of time, also on a machine without a GPU."""

from __future__ import annotations

import argparse
import re
import sys

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.parser import UsageError


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("kernels", help=SUMMARIES["kernels"])
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    build = kinds.add_parser(
        "build",
        help="compile into the cache",
        description="Compile every CUDA kernel into the cache ($PAGEWIRE_CACHE_ROOT/kernels, by default"
        " ~/.cache/pagewire/kernels), where workers find them. Needs CuPy and NVRTC, but no GPU.",
    )
    build.add_argument(
        "--arch",
        action="append",
        metavar="sm_XX",
        help="architecture such as sm_90; may be repeated (default: those of the GPUs of this machine)",
    )
    build.add_argument(
        "--jobs", type=int, metavar="N", help="number of compilations at once (default: one per core)"
    )
    build.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile all kernels, showing progress.

    Raises:
        UsageError: an invalid architecture, or none is given and the machine has no GPU.
    """
    from pagewire.kernels.cuda import compile
    from pagewire.kernels.native.cache import cache_folder

    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {options.jobs}")
    for arch in options.arch or ():
        if not re.fullmatch(r"sm_[1-9]\d{1,2}", arch):
            raise UsageError(f"--arch must have the form sm_90, got {arch!r}")
    try:
        for arch in dict.fromkeys(options.arch or architectures_here()):
            count = build(arch, options.jobs)
            print(f"{count} kernels for {arch} in {cache_folder()}")
    except compile.CompileError as error:
        print(f"pagewire kernels: {error}", file=sys.stderr)
        return 1
    return 0


def architectures_here() -> list[str]:
    """Return the architectures of this machine's GPUs, such as "sm_90".

    Raises:
        UsageError: there is no GPU.
    """
    import torch

    from pagewire.kernels.cuda.compile import architecture

    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("this machine has no GPU: give an architecture, such as --arch sm_90")
    return [architecture(torch.cuda.get_device_capability(index)) for index in range(count)]


def build(arch: str, num_threads: int | None) -> int:
    """Compile all kernel variants for an architecture and return their number.

    Raises:
        CompileError: a compilation failed (see `compile.build`), or the compiler or the kernels do not support
            this architecture.
    """
    from tqdm import tqdm

    from pagewire.kernels.cuda import compile
    from pagewire.kernels.cuda.variants import all_variants

    digits = arch.removeprefix("sm_")
    if compile.architecture((int(digits[:-1]), int(digits[-1]))) != arch:
        raise compile.CompileError(f"this NVRTC does not know {arch}")
    variants = [variant for variant in all_variants() if compile.runs_on(variant, arch)]
    with tqdm(
        total=len(variants), desc=arch, unit="kernel", disable=None
    ) as bar:  # no bar unless standard error is a terminal
        compile.build(variants, arch, lambda *_: bar.update(), num_threads)
    return len(variants)
