"""Compiling, caching, falling back."""

import io
import logging
import platform
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pagewire.kernels import ops
from pagewire.kernels.cpu import build as build_module
from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu import library as cpu_library
from pagewire.kernels.cpu.build import (
    BuildError,
    InstructionSet,
    build,
    compiled_for,
    supported_instruction_sets,
)
from pagewire.kernels.cpu.library import InstructionsRefusedError
from pagewire.kernels.cpu.progress import compile_seconds
from pagewire.kernels.data.layer import Activation
from pagewire.kernels.native.cache import cache_folder

PORTABLE = supported_instruction_sets()[-1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def fresh_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpu_kernels.load()` decides anew, in this test only."""
    monkeypatch.setattr(cpu_library, "choose", cpu_library.choose.__wrapped__)
    monkeypatch.setattr(cpu_kernels, "choose", cpu_library.choose)
    monkeypatch.setattr(cpu_kernels, "load", cpu_kernels.load.__wrapped__)


def fake_compiler(directory: Path, body: str) -> Path:
    """A compiler that notes every call in `calls`, then does what `body` says."""
    script = directory / "fake-cxx"
    script.write_text(f'#!/bin/sh\necho "$@" >> {directory}/calls\n{body}\n')
    script.chmod(0o755)
    return script


WRITES = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done'


def test_second_build_does_not_compile(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, WRITES)))
    library = build(PORTABLE)
    assert library == b"library\n" == build(PORTABLE) and cache_folder() == cache
    calls = (tmp_path / "calls").read_text().splitlines()
    compiled = [call for call in calls if "-c" in call.split()]
    assert len(compiled) == len(build_module.SOURCES)
    assert sum("-shared" in call.split() for call in calls) == 1
    (file,) = cache.iterdir()
    assert file.read_bytes().startswith(library) and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_processes_that_need_a_library_at_once_compile_it_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiler begins when all three builds have asked for its version, just before they look into the cache.
    begin = f"until [ $(grep -c -e --version {tmp_path}/calls) = 3 ]; do sleep 0.01; done"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, f'[ "$1" = --version ] || {begin}\n{WRITES}')))
    with ThreadPoolExecutor(3) as pool:
        libraries = list(pool.map(build, [PORTABLE] * 3))
    assert libraries == [b"library\n"] * 3 and len(list(cache.iterdir())) == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("-c" in call.split() for call in calls) == len(build_module.SOURCES)


def test_the_key_covers_compiler_flags_and_source(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo version 1\n" + WRITES)))
    build(PORTABLE)
    fake_compiler(tmp_path, "echo version 2\n" + WRITES)
    build(PORTABLE)
    monkeypatch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "-g"))
    build(PORTABLE)
    monkeypatch.setattr(build_module, "HEADERS", ())
    build(PORTABLE)
    assert len(list(cache.iterdir())) == 4


def test_a_failing_compiler_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"case \"$1\" in --version) ;; *) {WRITES}; echo 'error: no luck' >&2; exit 1;; esac"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, body)))
    with pytest.raises(BuildError, match="no luck"):
        build(PORTABLE)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache", "fresh_load")
def test_without_a_compiler_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.delenv("PAGEWIRE_CPU_ISA", raising=False)
    with caplog.at_level(logging.WARNING, logger="pagewire.kernels"):
        out = ops.activate_and_mul(torch.ones(2, 4), Activation.SILU)
    assert out.shape == (2, 2)
    assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text


@pytest.mark.usefixtures("fresh_load")
def test_a_forced_instruction_set_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="sse9"):
        cpu_kernels.load()
    monkeypatch.setenv("PAGEWIRE_CPU_ISA", "reference")
    assert cpu_kernels.load() is None


AVX2 = "fpu sse2 fma f16c avx2"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"
VNNI = f"{AVX512} avx512_vnni"
SAPPHIRE_RAPIDS = f"{VNNI} avx_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8"
WIDE = ["avx512_bf16", "avx512_vnni", "avx512"]
CHOICES = {
    "fpu sse2": ["portable"],
    AVX2: ["avx2", "portable"],
    f"{AVX2} avx_vnni": ["avx_vnni", "avx2", "portable"],
    AVX512: ["avx512", "avx2", "portable"],
    VNNI: ["avx512_vnni", "avx512", "avx2", "portable"],
    f"{VNNI} avx512_bf16": [*WIDE, "avx2", "portable"],
    f"{AVX512} amx_bf16 amx_tile": ["avx512", "avx2", "portable"],  # a guest whose host hides avx512_bf16
    SAPPHIRE_RAPIDS: ["amx", *WIDE, "avx_vnni", "avx2", "portable"],
    f"{SAPPHIRE_RAPIDS} amx_fp16": ["amx_fp16", "amx", *WIDE, "avx_vnni", "avx2", "portable"],
}


@pytest.fixture
def fake_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes /proc/cpuinfo, as the build reads it, say that the CPU has these flags."""

    def pretend(flags: str) -> None:
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor\t: 0\nmodel name\t: A CPU\nflags\t\t: {flags}\n")
        monkeypatch.setattr(build_module, "CPUINFO", file)
        monkeypatch.setattr(build_module, "cpu_flags", build_module.cpu_flags.__wrapped__)

    return pretend


@pytest.mark.parametrize(("flags", "names"), CHOICES.items(), ids=lambda value: value[-1] if value else "")
def test_the_best_set_of_a_cpu_comes_first(
    fake_cpu: Callable[[str], None], flags: str, names: list[str]
) -> None:
    fake_cpu(flags)
    assert [isa.name for isa in supported_instruction_sets()] == names
    vectors = next(name for name in names if "amx" not in name)
    assert {"portable": 0, "avx2": 3, "avx_vnni": 4, "avx512": 7, "avx512_vnni": 8, "avx512_bf16": 9}[
        vectors
    ] == len([flag for flag in build_module.emulated_tiles().compiler_flags if flag.startswith("-m")])


ASIMD, ATOMICS, ASIMDDP = 1 << 1, 1 << 8, 1 << 20  # of AT_HWCAP, with 1 for the scalar floats that all have
I8MM, BF16 = 1 << 13, 1 << 14  # of AT_HWCAP2
NEOVERSE_N1 = 1 | ASIMD | ATOMICS | ASIMDDP


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (1 | ASIMD, 0, ["neon", "portable"]),
        (1 | ASIMD | ATOMICS, 0, ["neon", "portable"]),
        (NEOVERSE_N1, 0, ["neon_dot", "neon", "portable"]),
        (NEOVERSE_N1, I8MM, ["neon_dot", "neon", "portable"]),
        (NEOVERSE_N1, I8MM | BF16, ["neon_bf16", "neon_dot", "neon", "portable"]),
    ],
    ids=["cortex-a72", "cortex-a72 with atomics", "neoverse-n1", "without bf16", "neoverse-v1"],
)
def test_the_best_set_of_an_arm_cpu_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int, names: list[str]
) -> None:
    file = tmp_path / "auxv"
    file.write_bytes(struct.pack("=10Q", 6, 4096, 16, first, 26, second, 23, 0, 0, 0))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(build_module, "AUXILIARY_VECTOR", file)
    monkeypatch.setattr(build_module, "cpu_flags", build_module.cpu_flags.__wrapped__)
    assert [isa.name for isa in supported_instruction_sets()] == names
    vectors = supported_instruction_sets()[0].compiler_flags
    assert build_module.emulated_tiles().compiler_flags[: len(vectors)] == vectors
    assert [isa.name for isa in compiled_for("aarch64")] == ["neon_bf16", "neon_dot", "neon", "portable"]


def test_a_wheel_has_the_sets_of_its_machine() -> None:
    sets = {
        machine: {isa.name for isa in compiled_for(machine)} for machine in ("x86_64", "aarch64", "riscv64")
    }
    assert sets["x86_64"] & sets["aarch64"] == sets["riscv64"] == {"portable"}
    assert sets["x86_64"] | sets["aarch64"] == {isa.name for isa in build_module.INSTRUCTION_SETS}


class FakeLibraries:
    """Takes the place of opening a library: some sets are refused by the system, some cannot be compiled."""

    def __init__(self, refused: set[str], not_compiled: set[str]) -> None:
        self.refused, self.not_compiled = refused, not_compiled
        self.opened: list[str] = []

    def __call__(self, isa: InstructionSet) -> object:
        self.opened.append(isa.name)
        if isa.name in self.refused:
            raise InstructionsRefusedError(f"the system does not let this process use {isa.name}")
        if isa.name in self.not_compiled:
            raise BuildError("unknown instruction")
        return object()


@pytest.mark.usefixtures("fresh_load")
@pytest.mark.parametrize(
    ("forced", "refused", "not_compiled", "chosen", "lines"),
    [
        (None, set(), set(), "amx", []),
        (None, {"amx"}, set(), "avx512_bf16", ["use amx"]),
        (None, {"amx"}, {"avx512_bf16"}, "avx512_vnni", ["use amx"]),
        (None, set(), {"amx", "avx512_bf16", "avx512_vnni"}, "avx512", []),
        ("avx512_bf16", set(), set(), "avx512_bf16", []),
        ("avx2", set(), set(), "avx2", []),
        ("amx_emulated", set(), set(), "amx_emulated", []),
        ("amx", {"amx"}, set(), None, ["use amx", "using PyTorch instead"]),
    ],
)
def test_a_set_that_cannot_be_used_gives_way_to_the_next(
    fake_cpu: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    forced: str | None,
    refused: set[str],
    not_compiled: set[str],
    chosen: str | None,
    lines: list[str],
) -> None:
    fake_cpu(SAPPHIRE_RAPIDS)
    libraries = FakeLibraries(refused, not_compiled)
    monkeypatch.setattr(cpu_library, "open_library", libraries)
    monkeypatch.delenv("PAGEWIRE_CPU_ISA", raising=False)
    if forced:
        monkeypatch.setenv("PAGEWIRE_CPU_ISA", forced)
    with caplog.at_level(logging.INFO, logger="pagewire.kernels"):
        kernels = cpu_kernels.load()
    assert (kernels.isa.name if kernels else None) == chosen
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(lines)
    assert all(part in line for part, line in zip(lines, warnings, strict=True))
    assert chosen is None or f"CPU kernels: {chosen}" in caplog.messages
    assert libraries.opened == ([forced] if forced else libraries.opened)


def test_one_openmp_runtime_in_the_process(best_kernels: cpu_kernels.CpuKernels) -> None:
    """The kernels use the threads that PyTorch has: a second runtime's would spin beside them."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    command = """if True:
        import re, torch
        from pathlib import Path
        from pagewire.kernels.cpu import kernels as cpu_kernels
        def runtimes():
            return set(re.findall(r"/\\S*/lib(?:gomp|iomp5|omp)\\b\\S*", Path("/proc/self/maps").read_text()))
        before = runtimes()
        assert cpu_kernels.load() is not None
        assert runtimes() == before, (before, runtimes())
        """
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)


def test_transformers_does_not_mistake_our_kernels_for_its_own() -> None:
    """transformers looks for a top-level module `kernels`; ours must not be one, wherever Python is started."""
    pytest.importorskip("transformers")
    root = Path(__file__).parents[3]
    command = (
        "import importlib.util, pagewire.kernels.ops, transformers.integrations.hub_kernels\n"
        "spec = importlib.util.find_spec('kernels')\n"
        f"assert spec is None or {str(root)!r} not in str(spec.origin), spec\n"
    )
    subprocess.run([sys.executable, "-P", "-c", command], cwd=root, check=True, timeout=120)


class Terminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        return True


def test_compiling_shows_its_parts(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    number = len(build_module.SOURCES)
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, WRITES)))
    with caplog.at_level(logging.WARNING, logger="pagewire.kernels"):
        build(PORTABLE)
    first, *quarters, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"compiling the CPU kernels for portable, once for this machine: {number} parts")
    assert [text.split(": ")[1].split(" in ")[0] for text in quarters] == [
        f"{part} of {number} parts" for part in range(number // 4, number + 1, number // 4)
    ]
    assert last.startswith("compiled the CPU kernels for portable in ") and compile_seconds() > 0
    caplog.clear()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    shutil.rmtree(cache)
    with caplog.at_level(logging.WARNING, logger="pagewire.kernels"):
        build(PORTABLE)
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert f": {number} of {number} parts in " in drawn[-2] and drawn[-1] == "" and not caplog.records
