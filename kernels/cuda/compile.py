"""Compiles kernels with NVRTC, through CuPy. Needs neither a driver nor a device, nor CUDA's headers.

A cubin holds one variant for one architecture. Its name in the cache is the hash of its inputs (source, compiler,
options), so changed inputs give another file.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from pagewire.kernels.cuda.cubin import Cubin
from pagewire.kernels.cuda.source import Variant, read_source
from pagewire.kernels.native import cache

OPTIONS = ("--std=c++17",)
OLDEST = (8, 0)
"""The compute capability that the kernels' instructions need."""


class CompileError(RuntimeError):
    """There is no compiler, the compiler does not support the device, or it failed."""


def install_command(cuda: int | None = None) -> str:
    """The shell command that installs the compiler for a major version of CUDA; None names both commands."""
    if cuda is None:
        return f"{install_command(12)}, or with a driver for CUDA 13: {install_command(13)}"
    return f"pip install 'cupy-cuda{cuda}x>=14' 'cuda-toolkit[nvrtc]=={cuda}.*'"


@functools.cache
def nvrtc() -> Any:
    """CuPy's binding of NVRTC.

    Raises:
        CompileError: CuPy or NVRTC is missing, or their versions differ; the message names the command to install.
    """
    try:
        import cupy
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise CompileError(f"CUDA kernels need CuPy ({error}): {install_command()}") from error
    cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000
    try:
        version = nvrtc.getVersion()
    except Exception as error:  # CuPy's search for the library raises many types
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
    """The architecture to compile for, for a device's compute capability: `sm_90` for (9, 0).

    A compiler older than the device compiles for the nearest older device of its generation.

    Raises:
        CompileError: the device is too old, or this NVRTC does not support its generation.
    """
    if capability < OLDEST:
        raise CompileError(
            f"kernels need compute capability {OLDEST[0]}.{OLDEST[1]}, not {_dotted(capability)}"
        )
    supported = [divmod(arch, 10) for arch in nvrtc().getSupportedArchs()]
    usable = [arch for arch in supported if arch[0] == capability[0] and arch <= capability]
    if not usable:
        version = _dotted(nvrtc().getVersion())
        raise CompileError(
            f"NVRTC {version} does not support compute capability {_dotted(capability)}: install a newer NVRTC"
        )
    major, minor = max(usable)
    return f"sm_{major}{minor}"


def runs_on(variant: Variant, arch: str) -> bool:
    """True if devices of an architecture (`sm_90`) can run a variant."""
    if variant.needs.endswith("a"):
        return variant.needs == f"{arch}a"
    return int(arch.removeprefix("sm_")) >= int(variant.needs.removeprefix("sm_") or 0)


def target(variant: Variant, arch: str) -> str:
    """What a variant is compiled for, for devices of an architecture (`sm_90`): that, or its own (`sm_90a`)."""
    return variant.needs if variant.needs.endswith("a") else arch


def compile_variant(variant: Variant, arch: str) -> Cubin:
    """The cubin of a variant for an architecture (`sm_90`), from the cache or compiled.

    Raises:
        CompileError: there is no compiler; it failed (the message has its log); or the architecture cannot run the
            variant.
    """
    if not runs_on(variant, arch):
        raise CompileError(f"{variant.name} needs {variant.needs}, not {arch}")
    name = _name_in_cache(variant, arch)
    if (stored := cache.read(name)) is not None:
        symbol, _, image = stored.partition(b"\n")
        return Cubin.of(symbol.decode(), image)
    cubin = compile_uncached(variant, arch)
    cache.write(name, cubin.symbol.encode() + b"\n" + cubin.image)
    return cubin


def compile_uncached(variant: Variant, arch: str) -> Cubin:
    """The cubin of a variant for an architecture (`sm_90`), compiled even if the cache has it.

    Raises:
        CompileError: see `compile_variant`.
    """
    symbol, image, _ = run_compiler(variant, arch)
    return Cubin.of(symbol, image)


def run_compiler(variant: Variant, arch: str, *options: str) -> tuple[str, bytes, str]:
    """Compile a variant for an architecture (`sm_90`) with further options: the symbol, the cubin, and the log.

    Raises:
        CompileError: see `compile_variant`.
    """
    compiler, arch = nvrtc(), target(variant, arch)
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
            compiler.compileProgram(program, (f"-arch={arch}", *OPTIONS, *options))
        except compiler.NVRTCError as error:
            log = compiler.getProgramLog(program)
            raise CompileError(f"{variant.name} for {arch}: {error}\n{log}") from error
        symbol = compiler.getLoweredName(program, variant.name)
        image = compiler.getCUBIN(program) + b"\0"  # CuPy drops the last byte as a string's terminator
        return symbol, image, compiler.getProgramLog(program)
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
        progress: called after each variant with (number done, total, variant).
        num_threads: variants compiled at a time; by default the number of this process's cores.

    Raises:
        CompileError: see `compile_variant`; variants that wait for a thread are then not compiled.
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


def _name_in_cache(variant: Variant, arch: str) -> str:
    key = repr((cache.FORMAT, read_source(variant.source), variant, arch, OPTIONS, nvrtc().getVersion()))
    return f"cuda-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
