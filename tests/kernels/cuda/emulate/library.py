"""Compiles kernels for the CPU, into shared objects in the cache, named by the hash of their inputs."""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagewire.kernels.cpu.build import compiler_command
from pagewire.kernels.cuda.source import Variant, read_source
from pagewire.kernels.native.cache import cache_folder, locked

HEADER = Path(__file__).parent / "cuda.h"
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-w",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
)
RACES = (
    "-fsanitize=thread",
    "-DRACES",
    "-fvisibility=hidden",
)  # other libraries have the same names of variables


@dataclass(frozen=True, slots=True)
class Edit:
    """A planted fault: a text that occurs once in a file, and its replacement."""

    file: str
    old: str
    new: str


@functools.cache
def load(variant: Variant, edits: tuple[Edit, ...] = (), arch: int = 900, races: bool = False) -> ctypes.CDLL:
    """A variant, as a library whose `run` runs it (`EMULATED_KERNEL` in `cuda.h`).

    Args:
        edits: replacements in copies of the files.
        arch: `__CUDA_ARCH__`.
        races: the library finds races in shared memory, and takes several times as long.

    Raises:
        ValueError: an edit's text does not occur exactly once in its file.
        CalledProcessError: the compiler failed.
    """
    texts = dict(read_source(variant.source))
    for edit in edits:
        if texts[edit.file].count(edit.old) != 1:
            raise ValueError(f"{edit.file} has {texts[edit.file].count(edit.old)} times {edit.old!r}")
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    texts["kernel.cu"] = texts.pop(variant.source)
    texts["main.cpp"] = f'#include "kernel.cu"\nEMULATED_KERNEL({variant.name})\n'
    flags = (*FLAGS, *(RACES if races else ()), f"-D__CUDA_ARCH__={arch}")
    return ctypes.CDLL(str(_compile(texts, (*compiler_command(), *flags))))


def _compile(texts: dict[str, str], command: tuple[str, ...]) -> Path:
    key = _hash((sorted(texts.items()), HEADER.read_text(), command))
    library = cache_folder() / f"emulated-{key}.so"
    if not library.exists():
        header = _precompiled_header(command)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as directory:
            for name, text in texts.items():
                (Path(directory) / name).write_text(text)
            compiled = Path(directory) / library.name
            compile_only = (*command, "-include", str(header), "-c", "main.cpp", "-o", "main.o")
            subprocess.run(compile_only, cwd=directory, check=True)
            # Without the flags of checks, for which the compiler would link libraries; `cuda.h` has what they call.
            link = (*compiler_command(), "-shared", "main.o", "-o", library.name)
            subprocess.run(link, cwd=directory, check=True)
            compiled.rename(library)
    return library


def load_all(faulty: Iterable[tuple[Variant, Edit]]) -> None:
    """Compile variants with an edit each, several at a time: the compiler is a process of its own."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda pair: load(pair[0], (pair[1],)), faulty))


def _precompiled_header(command: tuple[str, ...]) -> Path:
    """A copy of `cuda.h` beside its compiled form, which compilers prefer: it includes much of C++'s library."""
    folder = cache_folder() / f"emulated-{_hash((HEADER.read_text(), command))}"
    cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    header, compiled = folder / HEADER.name, folder / f"{HEADER.name}.gch"
    if compiled.exists():  # the lock may be held for as long as the kernels of a CPU take to compile
        return header
    with locked():
        if not compiled.exists():
            header.write_bytes(HEADER.read_bytes())
            unfinished = compiled.with_suffix(".unfinished")
            subprocess.run([*command, "-x", "c++-header", str(header), "-o", str(unfinished)], check=True)
            unfinished.rename(compiled)
    return header


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]
