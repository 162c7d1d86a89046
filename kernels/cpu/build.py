"""The libraries of CPU kernels: brought along by a wheel, or compiled with the host's compiler, once per machine.

A library holds the kernels for one instruction set. Its name in the cache is the hash of everything that went into
it, so a changed source, compiler or flag gives another file. In a wheel the name leaves out the compiler, which the
machine of a user need not have.
"""

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from pagewire.kernels.cpu.panels import MACROS, TILE_DEPTH, UNPACKED, Panels
from pagewire.kernels.cpu.progress import CompileProgress
from pagewire.kernels.native import cache, shipped

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
# Of a library in a wheel: stripped, with what it uses of the C++ runtime hidden in it, since machines have other
# versions of that. The rest of the runtime would ask for the newest C library.
STANDALONE = ("-s", "-static-libstdc++", "-Wl,--gc-sections")
EXPORTS = "{ global: pagewire_*; local: *; };"  # a version script of the linker

COMPILE_SECONDS = 1800.0  # for one part; on a busy machine it takes minutes


class BuildError(RuntimeError):
    """There is no compiler, or it failed."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """The CPU flags that a library needs (see `cpu_flags`), and the compiler's flags for them."""

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
_NEON = InstructionSet(
    "neon", frozenset({"asimd"}), ("-march=armv8-a", "-DPAGEWIRE_NEON"), Panels(16, 16)
)  # every ARM CPU with 64 bits
_NEON_DOT = InstructionSet(
    "neon_dot",
    _NEON.cpu_flags | {"atomics", "asimddp"},
    ("-march=armv8.2-a+dotprod", "-DPAGEWIRE_NEON"),
    _NEON.panels,
)
_NEON_BF16 = InstructionSet(
    "neon_bf16",
    _NEON_DOT.cpu_flags | {"i8mm", "bf16"},
    ("-march=armv8.2-a+dotprod+i8mm+bf16", "-DPAGEWIRE_NEON"),
    Panels(16, 16, frozenset({("bfloat16", 2)})),
)
_PORTABLE = InstructionSet("portable", panels=Panels(8, 8))
_X86_VECTORS = (_AVX512_BF16, _AVX512_VNNI, _AVX512, _AVX_VNNI, _AVX2)
_ARM_VECTORS = (_NEON_BF16, _NEON_DOT, _NEON)
VECTORS = (*_X86_VECTORS, *_ARM_VECTORS, _PORTABLE)
"""Sets without matrix tiles, the best of each architecture first."""

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
"""Of all architectures, the best of each first."""

EMULATED_TILES = "amx_emulated"
"""The name of `emulated_tiles`."""
REFERENCE = "reference"
"""The name of the kernels in plain torch."""


CPUINFO = Path("/proc/cpuinfo")
AUXILIARY_VECTOR = Path("/proc/self/auxv")
# Of ARM, by the entry of the auxiliary vector (AT_HWCAP, AT_HWCAP2) and the bit, with their names in /proc/cpuinfo.
ARM_FLAGS = {16: {1: "asimd", 8: "atomics", 20: "asimddp"}, 26: {13: "i8mm", 14: "bf16"}}


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The flags of this CPU, by their names in /proc/cpuinfo; empty if the system does not say.

    On ARM they come from what Linux tells each process, since an emulator may leave /proc/cpuinfo as the host's.
    """
    try:
        if platform.machine() == "aarch64":
            return _flags_in(AUXILIARY_VECTOR.read_bytes())
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _flags_in(auxiliary_vector: bytes) -> frozenset[str]:
    """ARM's flags. auxiliary_vector: pairs of an entry and its value, of 64 bits each."""
    entries = dict(struct.iter_unpack("=QQ", auxiliary_vector))
    return frozenset(
        name
        for entry, bits in ARM_FLAGS.items()
        for bit, name in bits.items()
        if entries.get(entry, 0) >> bit & 1
    )


def multiplies_bfloat16(isa: str) -> bool:
    """True if an instruction set multiplies numbers in bfloat16; the others convert each to float32 first."""
    sets = (chosen for chosen in INSTRUCTION_SETS if chosen.cpu_flags & {"avx512_bf16", "bf16"})
    return isa == EMULATED_TILES or isa in {chosen.name for chosen in sets}


def compiled_for(machine: str) -> list[InstructionSet]:
    """The sets that a compiler for a machine knows, the best first. machine: of `platform.machine`."""
    known = {"x86_64": (_AMX_FP16, _AMX, *_X86_VECTORS), "aarch64": _ARM_VECTORS}
    return [*known.get(machine, ()), _PORTABLE]


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
    """The content of the library for an instruction set: from the wheel, from the cache, or compiled.

    If several processes need the library at once, one of them compiles it and the others wait.

    Raises:
        BuildError: no compiler, the compiler failed, or there is no place for its files.
    """
    if (library := shipped.read(shipped_name(isa))) is not None:
        return library
    name = library_name(isa)
    if (library := cache.read(name)) is not None:
        return library
    with cache.locked():
        if (library := cache.read(name)) is None:
            library = _compiled(isa)
            cache.write(name, library)
    return library


def ship(isa: InstructionSet, folder: Path, linker: Sequence[str] = ()) -> Path:
    """Compile the library for an instruction set as a wheel has it, into a folder, and return its path.

    linker: a command that links it, such as one that knows an older C library (default: the compiler).

    Raises:
        BuildError: see `build`.
    """
    path = folder / shipped_name(isa)
    with tempfile.NamedTemporaryFile("w", suffix=".map") as exports:
        exports.write(EXPORTS)
        exports.flush()
        hidden = f"-Wl,--version-script={exports.name}"
        path.write_bytes(_compiled(isa, linker, (*STANDALONE, hidden)))
    return path


def library_name(isa: InstructionSet) -> str:
    """The name in the cache of the library for an instruction set.

    Raises:
        BuildError: no compiler, or it does not tell its version.
    """
    return _name(isa, cache.FORMAT, _run([*compiler_command(), "--version"]))


def is_shipped(isa: InstructionSet) -> bool:
    """True if the wheel has brought the library for an instruction set."""
    return shipped.read(shipped_name(isa)) is not None


def shipped_name(isa: InstructionSet) -> str:
    """The name in a wheel of the library for an instruction set; it needs no compiler."""
    return _name(isa, *STANDALONE, EXPORTS)


def _name(isa: InstructionSet, *parts: str) -> str:
    """A name that ends in a hash of these parts, the flags and the sources."""
    here, key = Path(__file__).parent, hashlib.sha256()
    for part in (*parts, platform.machine(), *_flags(isa)):
        key.update(part.encode() + b"\0")
    for source in (*HEADERS, *SOURCES):
        key.update((here / source).read_bytes() + b"\0")
    return f"cpu-{isa.name}-{key.hexdigest()[:32]}.so"


def _flags(isa: InstructionSet) -> list[str]:
    return [*FLAGS, *isa.compiler_flags, *isa.panels.macros]


def _compiled(isa: InstructionSet, linker: Sequence[str] = (), linker_flags: Sequence[str] = ()) -> bytes:
    command = [*compiler_command(), *_flags(isa)]
    sources = [Path(__file__).parent / source for source in SOURCES]
    try:
        with (
            CompileProgress(f"the CPU kernels for {isa.name}", len(SOURCES)) as progress,
            tempfile.TemporaryDirectory(prefix="pagewire-build-") as directory,
        ):
            library = Path(directory) / "kernels.so"
            objects = _compile(command, sources, library.parent, progress)
            link = [*(linker or command), "-shared", *map(str, objects)]
            _run([*link, "-o", str(library), *linker_flags])
            return library.read_bytes()
    except OSError as error:
        raise BuildError(f"cannot compile in {tempfile.gettempdir()}: {error}") from error


def _compile(command: list[str], sources: list[Path], folder: Path, progress: CompileProgress) -> list[Path]:
    """Each source by a compiler of its own, as many at a time as there are processors; returns the object files."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    jobs = [[*command, "-c", str(source), "-o", str(to)] for source, to in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = [pool.submit(_run, job) for job in jobs]
        for job in as_completed(running):
            job.result()
            progress.done()
    return objects


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
