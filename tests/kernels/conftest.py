import functools

import pytest

from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu.build import BuildError, InstructionSet, emulated_tiles, supported_instruction_sets
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.library import InstructionsRefusedError, open_library

TESTED = {isa.name: isa for isa in (*supported_instruction_sets(), emulated_tiles())}
"""Every instruction set of this CPU, and matrix tiles in plain C++."""
if "avx512_bf16" in TESTED:  # the same code as this one's and `avx512`'s: a library less to compile
    TESTED.pop("avx512_vnni")


@functools.cache
def built(isa: InstructionSet) -> CpuKernels | Exception:
    """The kernels for an instruction set, or why there are none."""
    try:
        return CpuKernels(isa, open_library(isa))
    except (BuildError, InstructionsRefusedError) as error:
        return error


def kernels_or_skip(isa: InstructionSet) -> CpuKernels:
    """The kernels for an instruction set; skips the test where this machine's compiler or system has none."""
    kernels = built(isa)
    if isinstance(kernels, Exception):
        pytest.skip(str(kernels))
    return kernels


@pytest.fixture(params=TESTED, scope="session")
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """The compiled kernels, for each instruction set in `TESTED`."""
    return kernels_or_skip(TESTED[request.param])


@pytest.fixture
def served_kernels(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    """Each of them in turn as the kernels of this process: those that the public functions call."""
    monkeypatch.setattr(cpu_kernels, "load", lambda: kernels)
    return kernels


@pytest.fixture(scope="session")
def best_kernels() -> CpuKernels:
    """The compiled kernels for the best instruction set alone."""
    return kernels_or_skip(supported_instruction_sets()[0])


@pytest.fixture(scope="session")
def emulated_kernels() -> CpuKernels:
    """The compiled kernels with emulated matrix tiles."""
    return kernels_or_skip(emulated_tiles())
