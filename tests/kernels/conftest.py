import pytest

from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu.kernels import CpuKernels
from tests.kernels.instruction_sets import BEST, EMULATED, PORTABLE, TESTED, kernels_or_skip

ALWAYS = {BEST.name, EMULATED.name, PORTABLE.name}
"""The ends of the range, and what this CPU may lack. Sets between break by changes of the kernels only."""


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.every_set) for name in TESTED],
    scope="session",
)
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
