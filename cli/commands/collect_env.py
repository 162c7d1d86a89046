"""`pagewire collect-env`: what a report of a problem should say of the machine."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = (
    *("pagewire", "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy"),
    *("pyzmq", "msgspec", "uvloop", "psutil", "cupy-cuda12x", "cupy-cuda13x"),
)


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("collect-env", help="print versions and hardware, for a report")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one `name: value` per line."""
    import psutil

    memory = psutil.virtual_memory()
    facts = {
        "system": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "processor": processor(),
        "instructions": ", ".join(instructions()) or "unknown",
        "cores": f"{psutil.cpu_count(logical=False)} physical, {psutil.cpu_count()} logical, "
        f"{len(os.sched_getaffinity(0))} usable",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available",
        "compiler": compiler(),
        "kernels": cpu_kernels(),
        "gpu": gpu(),
    }
    facts |= {name: version(name) for name in PACKAGES}
    facts |= {name: value for name, value in sorted(os.environ.items()) if relevant(name)}
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")
    return 0


def relevant(name: str) -> bool:
    """Environment variables that change how the engine runs; never one that could hold a secret."""
    secret = any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))
    return name.startswith(("PAGEWIRE_", "OMP_", "MKL_", "CUDA_", "HF_", "GOMP_")) and not secret


def version(package: str) -> str:
    """Installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def cpu_info(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def processor() -> str:
    """The processor's name."""
    return cpu_info("model name") or platform.processor() or "unknown"


def instructions() -> list[str]:
    """Vector instructions that matter here."""
    flags = set(cpu_info("flags").split())
    return [f for f in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_fp16") if f in flags]


def compiler() -> str:
    """The host compiler that CPU kernels are built with."""
    path = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if path is None:
        return "none: CPU kernels fall back to torch (install g++)"
    return subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()[0]


def cpu_kernels() -> str:
    """The instruction set that the CPU kernels use here; they are compiled for it if they never were."""
    from pagewire.kernels.cpu.library import choose

    try:
        library = choose()
    except ValueError as error:
        return f"none: {error}"
    return library.isa.name if library else "none: torch takes their place"


def gpu() -> str:
    """GPUs and driver, as nvidia-smi tells."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return "none"
    query = [path, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
    return "; ".join(lines) or "none"
