"""Compiles kernels with NVRTC, through CuPy. Needs neither a driver nor a device, nor CUDA's headers.

A cubin holds one variant for one architecture. Its file name is the hash of everything that went into it, so a
changed source, compiler or option gives another file, and a file once there is never written again.
"""

import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagewire.kernels.cache import cache_folder
from pagewire.kernels.cuda.source import Variant, read_source

OPTIONS = ("--std=c++17", "--ptxas-options=-v")
OLDEST = (8, 0)
"""The compute capability that the kernels' instructions need."""


class CompileError(RuntimeError):
    """There is no compiler, it does not fit, or it failed."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """One variant, compiled."""

    symbol: str
    """What the kernel is called in it."""
    registers: int
    """Per thread."""
    local_bytes: int
    """Local memory per thread: what is indexed in no register, and what is spilled."""
    spilled_bytes: int
    """Stored and loaded again for want of registers."""
    image: bytes
    """What the driver loads."""


def install_command(cuda: int | None = None) -> str:
    """What to type to get the compiler for a major version of CUDA, or for either."""
    if cuda is None:
        return f"{install_command(12)}, or with a driver for CUDA 13: {install_command(13)}"
    return f"pip install 'cupy-cuda{cuda}x>=14' 'cuda-toolkit[nvrtc]=={cuda}.*'"


@functools.cache
def nvrtc() -> Any:
    """CuPy's binding of NVRTC.

    Raises:
        CompileError: CuPy or NVRTC is missing, or they do not match; says which command mends it.
    """
    try:
        import cupy
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise CompileError(f"CUDA kernels need CuPy ({error}): {install_command()}") from error
    cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000
    try:
        version = nvrtc.getVersion()
    except Exception as error:  # whatever it is that the search for the library raises
        lines = str(error).splitlines() or [type(error).__name__]
        raise CompileError(
            f"CuPy for CUDA {cuda} finds no NVRTC ({lines[0]}): {install_command(cuda)}"
        ) from error
    if version[0] != cuda:
        raise CompileError(
            f"CuPy is for CUDA {cuda}, but NVRTC is {version[0]}.{version[1]}: {install_command(cuda)}"
        )
    return nvrtc


def architecture(capability: tuple[int, int]) -> str:
    """What to compile for, for a device of a compute capability: `sm_90` for (9, 0).

    A compiler older than the device compiles for the nearest older device of its generation.

    Raises:
        CompileError: the device is too old, or of a generation that this NVRTC does not know.
    """
    if capability < OLDEST:
        raise CompileError(
            f"kernels need compute capability {OLDEST[0]}.{OLDEST[1]}, not {_dotted(capability)}"
        )
    known = [divmod(arch, 10) for arch in nvrtc().getSupportedArchs()]
    fitting = [arch for arch in known if arch[0] == capability[0] and arch <= capability]
    if not fitting:
        version = _dotted(nvrtc().getVersion())
        raise CompileError(
            f"NVRTC {version} does not know compute capability {_dotted(capability)}: take a newer"
        )
    major, minor = max(fitting)
    return f"sm_{major}{minor}"


def runs_on(variant: Variant, arch: str) -> bool:
    """Whether an architecture (`sm_90`) has what a variant needs."""
    return variant.needs in ("", f"{arch}a")


def compile_variant(variant: Variant, arch: str) -> Cubin:
    """A variant for an architecture (`sm_90`), from the cache or compiled.

    Any number of processes may compile at once: each writes a file of its own and renames it.

    Raises:
        CompileError: no compiler, or it failed; holds its log. Or the architecture lacks what the variant needs.
        OSError: the cache cannot be written.
    """
    if not runs_on(variant, arch):
        raise CompileError(f"{variant.name} needs {variant.needs}, not {arch}")
    file = _cached_file(variant, arch)
    try:
        return _read(file)
    except (OSError, ValueError):  # not there, or cut short by a full disk
        pass
    cubin = compile_anew(variant, arch)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="build-") as directory:
        written = Path(directory) / file.name
        facts = {key: value for key, value in asdict(cubin).items() if key != "image"}
        facts["size"] = len(cubin.image)
        written.write_bytes(json.dumps(facts).encode() + b"\n" + cubin.image)
        written.rename(file)
    return cubin


def compile_anew(variant: Variant, arch: str) -> Cubin:
    """A variant for an architecture (`sm_90`), whatever is in the cache.

    Raises:
        CompileError: see `compile_variant`.
    """
    compiler, arch = nvrtc(), variant.needs or arch
    (_, text), *headers = read_source(variant.source)
    program = compiler.createProgram(
        text,
        variant.source,
        [header.encode() for _, header in headers],
        [name.encode() for name, _ in headers],
    )
    try:
        compiler.addNameExpression(program, variant.name)
        try:
            compiler.compileProgram(program, (f"-arch={arch}", *OPTIONS))
        except compiler.NVRTCError as error:
            log = compiler.getProgramLog(program)
            raise CompileError(f"{variant.name} for {arch}: {error}\n{log}") from error
        symbol = compiler.getLoweredName(program, variant.name)
        image = compiler.getCUBIN(program) + b"\0"  # CuPy takes the last byte for a string's end
        return Cubin(symbol, *_resources(compiler.getProgramLog(program), symbol), image)
    finally:
        compiler.destroyProgram(program)


def build(
    variants: Sequence[Variant],
    arch: str,
    progress: Callable[[int, int, Variant], object] | None = None,
    num_threads: int | None = None,
) -> dict[Variant, Cubin]:
    """Compile variants for an architecture, several at a time.

    Args:
        progress: called after each, with how many are done, of how many, and which.
        num_threads: as many as this process has cores by default.

    Raises:
        CompileError: see `compile_variant`; what has not been begun is dropped.
    """
    nvrtc()  # a missing compiler is reported once, not for each variant
    pool = ThreadPoolExecutor(num_threads or len(os.sched_getaffinity(0)), "compile")
    waiting = {pool.submit(compile_variant, variant, arch): variant for variant in dict.fromkeys(variants)}
    try:
        for done, future in enumerate(as_completed(waiting), start=1):
            future.result()
            if progress is not None:
                progress(done, len(waiting), waiting[future])
        return {variant: future.result() for future, variant in waiting.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _cached_file(variant: Variant, arch: str) -> Path:
    key = repr((read_source(variant.source), variant, arch, OPTIONS, nvrtc().getVersion()))
    return cache_folder() / f"cuda-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"


def _read(file: Path) -> Cubin:
    facts, _, image = file.read_bytes().partition(b"\n")
    fields = json.loads(facts)
    if fields.pop("size") != len(image):
        raise ValueError(f"{file} is cut short")
    return Cubin(**fields, image=image)


def _resources(log: str, symbol: str) -> tuple[int, int, int]:
    """Registers, bytes of local memory and bytes spilled, from the log of ptxas -v."""
    _, found, entry = log.partition(f"Compiling entry function '{symbol}'")
    entry = entry.partition("Compiling entry function")[0]
    registers = re.search(r"Used (\d+) registers", entry)
    local = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
    if not found or registers is None or local is None:
        raise CompileError(f"the compiler's log does not tell what {symbol} uses:\n{log}")
    return int(registers[1]), int(local[1]), int(local[2]) + int(local[3])
