"""`pagewire collect-env`: versions and hardware, to be pasted into a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.versions import installed
from pagewire.ipc.environment import READ

PACKAGES = (
    "pagewire",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "pyzmq",
    "msgspec",
    "uvloop",
    "psutil",
    "cupy-cuda12x",
    "cupy-cuda13x",
)


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("collect-env", help=SUMMARIES["collect-env"])
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one name and value per line."""
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
    facts |= {name: installed(name) for name in PACKAGES}
    facts |= {name: value for name, value in sorted(os.environ.items()) if relevant(name)}
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")
    return 0


def relevant(name: str) -> bool:
    """Return True for environment variables that affect the engine, except those that could hold a secret."""
    secret = any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))
    return (name in READ or name.startswith(("OMP_", "MKL_", "CUDA_", "HF_", "GOMP_"))) and not secret


def cpu_info(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; "" if it is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def processor() -> str:
    """Return the processor's name."""
    return cpu_info("model name") or platform.processor() or "unknown"


def instructions() -> list[str]:
    """Return the CPU's vector instruction sets that the kernels can use."""
    flags = set((cpu_info("flags") or cpu_info("Features")).split())  # the latter on ARM
    vectors = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16")
    others = ("amx_bf16", "amx_int8", "amx_fp16", "asimd", "asimddp", "i8mm", "bf16")
    return [flag for flag in (*vectors, *others) if flag in flags]


def compiler() -> str:
    """Return the version line of the C++ compiler that builds the CPU kernels."""
    path = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if path is None:
        return "none (only kernels that came with the wheel, or were compiled before, are there)"
    return subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()[0]


def cpu_kernels() -> str:
    """Return the instruction set that the CPU kernels use; compiles them if that has not been done yet."""
    from pagewire.kernels.cpu.library import choose

    try:
        library = choose()
    except ValueError as error:
        return f"none: {error}"
    return library.isa.name if library else "none: torch is used instead"


def gpu() -> str:
    """Return the GPUs and the driver version that nvidia-smi reports."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return "none"
    query = [path, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
    return "; ".join(lines) or "none"
