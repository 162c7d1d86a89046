import functools

import pytest

from pagewire.kernels.cpu.build import BuildError, supported_instruction_sets
from pagewire.kernels.cpu.native import NativeKernels


@functools.cache
def _kernels(name: str) -> NativeKernels | BuildError:
    isa = next(isa for isa in supported_instruction_sets() if isa.name == name)
    try:
        return NativeKernels(isa)
    except BuildError as error:
        return error


@pytest.fixture(params=[isa.name for isa in supported_instruction_sets()], scope="session")
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    """The compiled kernels, for each instruction set of this CPU (and its compiler)."""
    built = _kernels(request.param)
    if isinstance(built, BuildError):
        pytest.skip(str(built))
    return built


@pytest.fixture(scope="session")
def best_kernels() -> NativeKernels:
    """The compiled kernels for the best instruction set alone."""
    built = _kernels(supported_instruction_sets()[0].name)
    if isinstance(built, BuildError):
        pytest.skip(str(built))
    return built
