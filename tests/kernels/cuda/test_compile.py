"""Every variant compiles for every architecture, without spills and without local memory."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels.cuda import compile, limits, lora, norms, probes
from pagewire.kernels.cuda.attention import HEAD_DIMS
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.cuda.variants import Launches, all_variants
from tests.kernels.cuda.emulate.recorder import Recorder

ARCHITECTURE = "sm_90"
OTHERS = ("sm_80", "sm_89", "sm_100")
ONE = norms.variants()[0]
EVERY = all_variants()
OF_WARPGROUPS = [v for v in EVERY if v.needs == f"{ARCHITECTURE}a" and "<bf16, " in v.name]


def largest_of_each_family() -> list[Variant]:
    """For each kernel and its types, the variant with the largest numbers, which needs the most registers."""
    families: dict[tuple[str, str], Variant] = {}
    for variant in EVERY:  # from small to large
        family = re.sub(r"\b\d+\b", "N", variant.name)
        families[variant.source, family] = variant
    return list(families.values())


@pytest.mark.every_variant
@pytest.mark.parametrize(
    ("arch", "variants"),
    [
        *((arch, largest_of_each_family()) for arch in (ARCHITECTURE, *OTHERS)),
        (ARCHITECTURE, EVERY),
    ],
    ids=[ARCHITECTURE, *OTHERS, "every variant"],
)
def test_no_variant_spills_or_uses_local_memory(
    nvrtc: object, registers: dict[Variant, dict[str, int]], arch: str, variants: list[Variant]
) -> None:
    fitting = [variant for variant in variants if compile.runs_on(variant, arch)]
    cubins = compile.build(fitting, arch)
    for variant, cubin in cubins.items():
        registers.setdefault(variant, {})[compile.target(variant, arch)] = cubin.registers
    assert len(cubins) == len(fitting) > 0
    assert [v.name for v, cubin in cubins.items() if cubin.local_bytes] == []
    assert all(cubin.image.startswith(b"\x7fELF") and cubin.registers > 0 for cubin in cubins.values())


@pytest.mark.every_variant
@pytest.mark.parametrize("variant", OF_WARPGROUPS, ids=lambda variant: variant.name)
def test_products_of_warpgroups_are_not_waited_for(nvrtc: object, variant: Variant) -> None:
    """The compiler says if it must wait for each, or adds instructions, for it cannot follow the registers."""
    _, _, log = compile.run_compiler(variant, ARCHITECTURE, "--ptxas-options=-v")
    assert "Used" in log, "the compiler says nothing"
    remarks = [line for line in log.splitlines() if "(C7" in line or "gmma" in line.lower()]
    assert remarks == []


MOST_SHARED = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
"""Bytes of shared memory that a block may have, from NVIDIA's table of compute capabilities."""


@pytest.mark.every_variant
@pytest.mark.parametrize("arch", MOST_SHARED)
def test_every_launch_is_within_the_limits(nvrtc: object, arch: str) -> None:
    """Threads as compiled for, registers, and shared memory, of the kernels with the largest heads and latents."""
    capability = divmod(int(arch.removeprefix("sm_")), 10)
    kv_dtype = torch.float8_e4m3fn
    kinds = Launches(
        torch.bfloat16, kv_dtype, max(HEAD_DIMS), recurrent=True, mixture=True, capability=capability
    )
    of_latents = Launches(
        torch.bfloat16, torch.bfloat16, max(limits.LATENTS), capability=capability, indexed=True
    )
    every = [kinds, kinds._replace(invariant=True), of_latents]
    launches = [launch for each in every for launch in Recorder.of_trials(each)]
    cubins = compile.build([launch.variant for launch in launches], arch)
    for variant, block, shared_bytes in launches:
        cubin = cubins[variant]
        assert cubin.bound == block[0]
        limits.check_launch(
            variant.name,
            block,
            bound=cubin.bound,
            registers=cubin.registers,
            shared_bytes=shared_bytes + cubin.shared_bytes,
            most_shared_bytes=MOST_SHARED[arch],
        )


def test_names_are_unique() -> None:
    names = [(variant.source, variant.name) for variant in EVERY]
    assert len(set(names)) == len(names)


@pytest.fixture
def spilling(tmp_path: Path) -> Variant:
    """A kernel that needs local memory: it indexes an array with its input."""
    source = tmp_path / "spilling.cu"
    source.write_text(
        "struct P {\n    int* x;\n};\n"
        "template <int N> __global__ void spilling(const __grid_constant__ P p) {\n"
        "    int a[N];\n    for (int i = 0; i < N; i++) a[i] = p.x[i];\n"
        "    for (int i = 0; i < N; i++) p.x[i] = a[p.x[i] % N] + a[p.x[i + N] % N];\n}\n"
    )
    return Variant(str(source), "spilling<64>", "P")


def test_local_memory_is_reported(nvrtc: object, spilling: Variant, cache: Path) -> None:
    assert compile.compile_variant(spilling, "sm_90").local_bytes > 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def test_a_cubin_is_compiled_once(nvrtc: object, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile.compile_variant(ONE, "sm_90")
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(compile, "compile_uncached", None)
    assert compile.compile_variant(ONE, "sm_90") == first


def test_a_truncated_cubin_is_compiled_again(nvrtc: object, cache: Path) -> None:
    first = compile.compile_variant(ONE, "sm_90")
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    assert compile.compile_variant(ONE, "sm_90") == first


def test_the_cache_key_covers_variant_architecture_options_and_source(
    nvrtc: object, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = norms.variants()[1]
    files = {compile._name_in_cache(variant, arch) for variant in (ONE, other) for arch in ("sm_80", "sm_90")}
    monkeypatch.setattr(compile, "OPTIONS", (*compile.OPTIONS, "-lineinfo"))
    files.add(compile._name_in_cache(ONE, "sm_90"))
    monkeypatch.setattr(compile, "read_source", lambda name: ((name, "// changed"),))
    files.add(compile._name_in_cache(ONE, "sm_90"))
    assert len(files) == 6


def test_progress_counts_every_variant_once(nvrtc: object, cache: Path) -> None:
    calls: list[tuple[int, int, Variant]] = []
    some = norms.variants()[:3]
    compile.build([*some, some[0]], "sm_90", lambda *call: calls.append(call), num_threads=2)
    assert [call[:2] for call in calls] == [(1, 3), (2, 3), (3, 3)]
    assert {call[2] for call in calls} == set(some)


def test_a_compile_error_has_the_compilers_log(nvrtc: object, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.cu").write_text("template <int N> __global__ void bad(int p) { undeclared = 1; }")
    with pytest.raises(
        compile.CompileError, match=r'bad<1> for sm_90[^$]*identifier "undeclared" is undefined'
    ):
        compile.build([Variant(str(tmp_path / "bad.cu"), "bad<1>", "P")], "sm_90")


def test_a_variant_for_another_architecture_is_refused(nvrtc: object, cache: Path) -> None:
    hopper = Variant(ONE.source, ONE.name, ONE.parameters, needs="sm_90a")
    with pytest.raises(compile.CompileError, match="needs sm_90a, not sm_89"):
        compile.compile_variant(hopper, "sm_89")
    assert compile.compile_variant(hopper, "sm_90").registers > 0


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 0), "sm_100")],
)
def test_a_device_gets_code_for_its_capability(nvrtc: object, capability: tuple[int, int], arch: str) -> None:
    assert compile.architecture(capability) == arch


class FakeNvrtc:
    """Supports the architectures of an older NVRTC."""

    def getVersion(self) -> tuple[int, int]:  # noqa: N802
        return 12, 0

    def getSupportedArchs(self) -> list[int]:  # noqa: N802
        return [70, 75, 80, 86, 87, 90]


def test_an_older_compiler_uses_the_nearest_older_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "nvrtc", FakeNvrtc)
    assert compile.architecture((8, 9)) == "sm_87"
    with pytest.raises(compile.CompileError, match=r"NVRTC 12\.0 does not support compute capability 10\.0"):
        compile.architecture((10, 0))
    with pytest.raises(compile.CompileError, match=r"need compute capability 8\.0, not 7\.5"):
        compile.architecture((7, 5))


def _nvrtc_error(code: str) -> str:
    """The error message of `nvrtc()` in a process that ran `code` before."""
    program = (
        f"{code}\nfrom pagewire.kernels.cuda import compile\n"
        "try:\n    compile.nvrtc()\nexcept compile.CompileError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


FAKE_CUPY = """
import sys, types
cupy = types.ModuleType("cupy")
cupy.cuda = sys.modules["cupy.cuda"] = types.ModuleType("cupy.cuda")
cupy.cuda.runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 12090)
cupy.cuda.nvrtc = types.SimpleNamespace(getVersion=lambda: {version})
sys.modules["cupy"] = cupy
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "import sys; sys.modules['cupy'] = None",
            ["CUDA kernels need CuPy", "pip install 'cupy-cuda12x>=14'", "'cupy-cuda13x>=14'"],
        ),
        (
            FAKE_CUPY.format(version="1 / 0"),
            ["CuPy for CUDA 12 finds no NVRTC (division by zero)", "'cuda-toolkit[nvrtc]==12.*'"],
        ),
        (
            FAKE_CUPY.format(version="(13, 0)"),
            ["CuPy is for CUDA 12, but NVRTC is 13.0", "pip install 'cupy-cuda12x>=14'"],
        ),
    ],
    ids=["no CuPy", "no NVRTC", "another NVRTC"],
)
def test_the_error_names_what_is_missing_and_the_command_that_installs_it(
    code: str, expected: list[str]
) -> None:
    message = _nvrtc_error(code)
    assert [part for part in expected if part not in message] == [], message


def test_the_compiler_has_the_expected_version(nvrtc: Any) -> None:
    """If `PAGEWIRE_TEST_NVRTC` names a version (`13.0`), these tests run with that version of NVRTC."""
    expected = os.environ.get("PAGEWIRE_TEST_NVRTC")
    if expected is None:
        pytest.skip("PAGEWIRE_TEST_NVRTC names no version")
    assert compile._dotted(nvrtc.getVersion()) == expected


class NvrtcWithLogs:
    """NVRTC that keeps the log of each program."""

    def __init__(self, nvrtc: Any) -> None:
        self._nvrtc = nvrtc
        self.logs: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return self._destroy if name == "destroyProgram" else getattr(self._nvrtc, name)

    def _destroy(self, program: Any) -> None:
        self.logs.append(self._nvrtc.getProgramLog(program))
        self._nvrtc.destroyProgram(program)


@pytest.mark.parametrize("arch", [ARCHITECTURE, *OTHERS])
def test_a_cubin_says_what_the_compiler_says(nvrtc: Any, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Registers, local and shared memory: of a plain kernel, one with much shared memory, and one without names."""
    logged = NvrtcWithLogs(nvrtc)
    monkeypatch.setattr(compile, "nvrtc", lambda: logged)
    monkeypatch.setattr(compile, "OPTIONS", (*compile.OPTIONS, "--ptxas-options=-v"))
    for variant in (ONE, lora.variants()[0], probes.variant("fill_shared", "Fill")):
        cubin = compile.compile_uncached(variant, arch)
        log = logged.logs.pop().partition(f"function '{cubin.symbol}'")[2].partition("Compiling")[0]
        (registers,) = re.findall(r"Used (\d+) registers", log)
        (local,) = re.findall(r"(\d+) bytes stack frame", log)
        shared = re.findall(r"(\d+) bytes smem", log) or [0]
        found = [cubin.registers, cubin.local_bytes, cubin.shared_bytes]
        assert found == [int(registers), int(local), int(*shared)]
