import functools

import pytest

from pagewire.kernels.cpu import native
from pagewire.kernels.cpu.build import BuildError, InstructionSet, emulated_tiles, supported_instruction_sets
from pagewire.kernels.cpu.library import InstructionsRefusedError
from pagewire.kernels.cpu.native import NativeKernels

TESTED = {isa.name: isa for isa in (*supported_instruction_sets(), emulated_tiles())}
"""Every instruction set of this CPU, and matrix tiles in plain C++."""


@functools.cache
def built(isa: InstructionSet) -> NativeKernels | Exception:
    """The kernels for an instruction set, or why there are none."""
    try:
        return NativeKernels(isa)
    except (BuildError, InstructionsRefusedError) as error:
        return error


def kernels_or_skip(isa: InstructionSet) -> NativeKernels:
    """The kernels for an instruction set; skips the test where this machine's compiler or system has none."""
    kernels = built(isa)
    if isinstance(kernels, Exception):
        pytest.skip(str(kernels))
    return kernels


@pytest.fixture(params=TESTED, scope="session")
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    """The compiled kernels, for each instruction set in `TESTED`."""
    return kernels_or_skip(TESTED[request.param])


@pytest.fixture
def served_kernels(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> NativeKernels:
    """Each of them in turn as the kernels of this process: those that the public functions call."""
    monkeypatch.setattr(native, "load", lambda: kernels)
    return kernels


@pytest.fixture(scope="session")
def best_kernels() -> NativeKernels:
    """The compiled kernels for the best instruction set alone."""
    return kernels_or_skip(supported_instruction_sets()[0])


@pytest.fixture(scope="session")
def emulated_kernels() -> NativeKernels:
    """The compiled kernels with emulated matrix tiles."""
    return kernels_or_skip(emulated_tiles())
