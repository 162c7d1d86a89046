"""Compiles the CPU kernels with the host's compiler, once per machine.

A library holds the kernels for one instruction set. Its name in the cache is the hash of everything that went into
it, so a changed source, compiler or flag gives another file.
"""

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from pagewire.kernels.cpu.panels import MACROS, TILE_DEPTH, UNPACKED, Panels
from pagewire.kernels.cpu.progress import CompileProgress
from pagewire.kernels.native import cache

logger = logging.getLogger("pagewire.kernels")

SOURCES = (  # the slowest to compile first
    "attention.cpp",
    "quantised.cpp",
    "linear.cpp",
    "layers.cpp",
    "activations.cpp",
    "mixers.cpp",
    "state_matrices.cpp",
    "sampling.cpp",
    "state_channels.cpp",
    "adapters.cpp",
    "experts.cpp",
    "latents.cpp",
    "indexer.cpp",
    "stack.cpp",
    "decode.cpp",
    "encode.cpp",
    "integers.cpp",
    "collective.cpp",
    "team.cpp",
    "prepare.cpp",
)
HEADERS = tuple(sorted(path.name for path in Path(__file__).parent.glob("*.h")))
# Contracting a * b + c is left to explicit fused multiply-adds: the bits must not depend on inlining.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    *MACROS,
)


COMPILE_SECONDS = 1800.0  # for one part; on a busy machine it takes minutes


class BuildError(RuntimeError):
    """There is no compiler, or it failed."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """The CPU flags that a library needs (names of /proc/cpuinfo), and the compiler's flags for them."""

    name: str
    cpu_flags: frozenset[str] = frozenset()
    compiler_flags: tuple[str, ...] = ()
    panels: Panels = UNPACKED


_NARROW = Panels(16, 16)
_WIDE = Panels(64, 32)  # the sums of wider panels of integers would not fit AVX-512's registers
_PAIRS = Panels(64, 32, frozenset({("bfloat16", 2)}))
_TILES = Panels(64, 64, frozenset({("bfloat16", TILE_DEPTH)}))
_TILES_FP16 = Panels(64, 64, frozenset({("bfloat16", TILE_DEPTH), ("float16", TILE_DEPTH)}))
_AVX2 = InstructionSet("avx2", frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c"), _NARROW)
_AVX512 = InstructionSet(
    "avx512",
    _AVX2.cpu_flags | {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    (*_AVX2.compiler_flags, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    _WIDE,
)
_AVX512_VNNI = InstructionSet(
    "avx512_vnni", _AVX512.cpu_flags | {"avx512_vnni"}, (*_AVX512.compiler_flags, "-mavx512vnni"), _WIDE
)
_AVX512_BF16 = InstructionSet(  # no CPU has the former without the latter
    "avx512_bf16",
    _AVX512_VNNI.cpu_flags | {"avx512_bf16"},
    (*_AVX512_VNNI.compiler_flags, "-mavx512bf16"),
    _PAIRS,
)
_AVX_VNNI = InstructionSet(
    "avx_vnni", _AVX2.cpu_flags | {"avx_vnni"}, (*_AVX2.compiler_flags, "-mavxvnni"), _NARROW
)
_PORTABLE = InstructionSet("portable", panels=Panels(8, 8))
VECTORS = (_AVX512_BF16, _AVX512_VNNI, _AVX512, _AVX_VNNI, _AVX2, _PORTABLE)
"""Sets without matrix tiles, the best first."""

_AMX = InstructionSet(
    "amx",
    _AVX512_BF16.cpu_flags | {"amx_tile", "amx_bf16", "amx_int8"},
    (*_AVX512_BF16.compiler_flags, "-DPAGEWIRE_TILES"),
    _TILES,
)
_AMX_FP16 = InstructionSet(
    "amx_fp16",
    _AMX.cpu_flags | {"amx_fp16"},
    (*_AMX.compiler_flags, "-DPAGEWIRE_TILES_FP16"),
    _TILES_FP16,
)
INSTRUCTION_SETS = (_AMX_FP16, _AMX, *VECTORS)
"""The best first."""

EMULATED_TILES = "amx_emulated"
"""The name of `emulated_tiles`."""
REFERENCE = "reference"
"""The name of the kernels in plain torch."""


CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The flags of this CPU in /proc/cpuinfo; empty if that file is missing."""
    try:
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def multiplies_bfloat16(isa: str) -> bool:
    """True if an instruction set multiplies numbers in bfloat16; the others convert each to float32 first."""
    sets = (chosen for chosen in INSTRUCTION_SETS if "avx512_bf16" in chosen.cpu_flags)
    return isa == EMULATED_TILES or isa in {chosen.name for chosen in sets}


def supported_instruction_sets() -> list[InstructionSet]:
    """Those that this CPU has, the best first; `portable` is always among them."""
    return [isa for isa in INSTRUCTION_SETS if isa.cpu_flags <= cpu_flags()]


def emulated_tiles() -> InstructionSet:
    """`amx_fp16` with the tile instructions in plain C++: to its bits, on any CPU, and slowly. Only for tests."""
    vectors = next(isa for isa in VECTORS if isa.cpu_flags <= cpu_flags())
    flags = ("-DPAGEWIRE_TILES", "-DPAGEWIRE_TILES_FP16", "-DPAGEWIRE_EMULATE_TILES")
    return InstructionSet(EMULATED_TILES, vectors.cpu_flags, (*vectors.compiler_flags, *flags), _TILES_FP16)


def panels_of(isa: str) -> Panels:
    """The panels of an instruction set by its name."""
    instruction_sets = (*INSTRUCTION_SETS, emulated_tiles())
    return next((known.panels for known in instruction_sets if known.name == isa), UNPACKED)


def compiler_command() -> list[str]:
    """`$CXX` if set, else g++ or clang++.

    Raises:
        BuildError: none of them is there.
    """
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for candidate in candidates:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    raise BuildError(
        f"no C++ compiler ({', '.join(candidates)}): install one, such as by `apt install g++`, or set CXX"
    )


def build(isa: InstructionSet) -> bytes:
    """The content of the library for an instruction set, compiled if it is not in the cache.

    If several processes need the library at once, one of them compiles it and the others wait.

    Raises:
        BuildError: no compiler, the compiler failed, or there is no place for its files.
    """
    command = [*compiler_command(), *FLAGS, *isa.compiler_flags, *isa.panels.macros]
    name = library_name(isa)
    if (library := cache.read(name)) is not None:
        return library
    with cache.locked():
        if (library := cache.read(name)) is None:
            with CompileProgress(f"the CPU kernels for {isa.name}", len(SOURCES)) as progress:
                library = _compiled(command, progress)
            cache.write(name, library)
    return library


def library_name(isa: InstructionSet) -> str:
    """The name in the cache of the library for an instruction set.

    Raises:
        BuildError: no compiler, or it does not tell its version.
    """
    here, compiler = Path(__file__).parent, compiler_command()
    flags = [*FLAGS, *isa.compiler_flags, *isa.panels.macros]
    key = hashlib.sha256()
    for part in (cache.FORMAT, _run([*compiler, "--version"]), platform.machine(), *flags):
        key.update(part.encode() + b"\0")
    for source in (*HEADERS, *SOURCES):
        key.update((here / source).read_bytes() + b"\0")
    return f"cpu-{isa.name}-{key.hexdigest()[:32]}.so"


def _compiled(command: list[str], progress: CompileProgress) -> bytes:
    sources = [Path(__file__).parent / source for source in SOURCES]
    try:
        with tempfile.TemporaryDirectory(prefix="pagewire-build-") as directory:
            library = Path(directory) / "kernels.so"
            _compile(command, sources, library, progress)
            return library.read_bytes()
    except OSError as error:
        raise BuildError(f"cannot compile in {tempfile.gettempdir()}: {error}") from error


def _compile(command: list[str], sources: list[Path], library: Path, progress: CompileProgress) -> None:
    """Each source by a compiler of its own, as many at a time as there are processors, then all of them linked."""
    objects = [library.parent / f"{source.stem}.o" for source in sources]
    jobs = [[*command, "-c", str(source), "-o", str(to)] for source, to in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = [pool.submit(_run, job) for job in jobs]
        for job in as_completed(running):
            job.result()
            progress.done()
    _run([*command, "-shared", *map(str, objects), "-o", str(library)])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        first_error = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{command[0]} exited with {done.returncode}: {first_error}")
    return done.stdout
