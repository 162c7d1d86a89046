import pytest

from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu.kernels import CpuKernels
from tests.kernels.instruction_sets import BEST, EMULATED, TESTED, kernels_or_skip


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
    return kernels_or_skip(BEST)


@pytest.fixture(scope="session")
def emulated_kernels() -> CpuKernels:
    """The compiled kernels with emulated matrix tiles."""
    return kernels_or_skip(EMULATED)
