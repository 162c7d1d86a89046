"""What `pagewire --version` prints: the versions here, and which kernels serve. It imports no torch."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from pagewire.ipc.version import __version__

ABSENT = "not installed"
CUPY = ("cupy-cuda12x", "cupy-cuda13x")


class VersionAction(argparse.Action):
    """Prints the versions and ends the process; they are looked up only then."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(
            option_strings, dest, nargs=0, help="print versions and kernels, and exit", **options
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser._print_message("\n".join(version_lines()) + "\n", sys.stdout)
        parser.exit()


def version_lines() -> Iterator[str]:
    """The version of pagewire, then a line for each thing that decides what a model runs on."""
    yield f"pagewire {__version__}"
    for name, value in (("kernels", kernels()), ("torch", installed("torch")), ("cuda", cuda())):
        yield f"{name:<8} {value}"


def installed(package: str) -> str:
    """The installed version of a package; `ABSENT` if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ABSENT


def kernels() -> str:
    """The instruction set of the CPU kernels, and where they come from; compiles nothing."""
    try:
        from pagewire.kernels.cpu import build, library
        from pagewire.kernels.native import cache
    except ModuleNotFoundError:
        return "none: pagewire-client has no engine"
    try:
        name = library.expected_isa()
    except ValueError as error:
        return f"none: {error}"
    if name == build.REFERENCE:
        return "PyTorch's: no compiled kernels came with the wheel, and there is no C++ compiler"
    chosen = next(isa for isa in (*build.INSTRUCTION_SETS, build.emulated_tiles()) if isa.name == name)
    if build.is_shipped(chosen):
        return f"{name}, from the wheel"
    try:
        known = cache.read(build.library_name(chosen)) is not None
    except build.BuildError as error:
        return f"PyTorch's: {error}"
    return f"{name}, compiled here" if known else f"{name}, compiled at the first start"


def cuda() -> str:
    """The version of CUDA that torch is built for, and CuPy's, which launches our kernels."""
    torch = installed("torch")
    if torch == ABSENT or torch.endswith("+cpu"):
        return "none: " + ("there is no torch" if torch == ABSENT else "this torch is built for CPUs")
    built = re.search(r"\+cu(\d+)(\d)$", torch)
    runtime = f"{built[1]}.{built[2]}" if built else runtime_version()
    cupy = next((f"{name} {found}" for name in CUPY if (found := installed(name)) != ABSENT), None)
    return f"{runtime}, {cupy or 'no CuPy: GPUs need pagewire[cuda12] or pagewire[cuda13]'}"


def runtime_version() -> str:
    """The version of the CUDA runtime that torch's wheel has brought along; "unknown" if it has its own."""
    found = (installed(name) for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"))
    return next((version for version in found if version != ABSENT), "unknown")
