"""Compiles kernels for the CPU, into shared objects kept by the hash of all that went into them."""

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewire.kernels.cache import cache_folder
from pagewire.kernels.cpu.build import compiler_command
from pagewire.kernels.cuda.source import Variant, read_source

HEADER = Path(__file__).parent / "cuda.h"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-fno-strict-aliasing", "-ffp-contract=off")


@dataclass(frozen=True, slots=True)
class Edit:
    """A planted fault: text that stands once in a file, and what stands there instead."""

    file: str
    old: str
    new: str


@functools.cache
def load(variant: Variant, edits: tuple[Edit, ...] = (), arch: int = 900) -> ctypes.CDLL:
    """A variant, as a library whose `run` runs it (`EMULATED_KERNEL` in `cuda.h`).

    Args:
        edits: applied to copies of the files first.
        arch: `__CUDA_ARCH__`.

    Raises:
        ValueError: an edit's text does not stand exactly once in its file.
        CalledProcessError: the compiler failed.
    """
    texts = dict(read_source(variant.source))
    for edit in edits:
        if texts[edit.file].count(edit.old) != 1:
            raise ValueError(f"{edit.file} has {texts[edit.file].count(edit.old)} times {edit.old!r}")
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    texts["kernel.cu"] = texts.pop(variant.source)
    includes = f'#include "{HEADER.name}"\n#include "kernel.cu"\n'
    texts |= {HEADER.name: HEADER.read_text(), "main.cpp": f"{includes}EMULATED_KERNEL({variant.name})\n"}
    return ctypes.CDLL(str(_compile(texts, [*FLAGS, f"-D__CUDA_ARCH__={arch}"])))


def _compile(texts: dict[str, str], flags: Sequence[str]) -> Path:
    command = [*compiler_command(), *flags]
    key = hashlib.sha256(repr((sorted(texts.items()), command)).encode()).hexdigest()[:32]
    library = cache_folder() / f"emulated-{key}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as directory:
            for name, text in texts.items():
                (Path(directory) / name).write_text(text)
            compiled = Path(directory) / library.name
            subprocess.run([*command, "main.cpp", "-o", library.name], cwd=directory, check=True)
            compiled.rename(library)
    return library
