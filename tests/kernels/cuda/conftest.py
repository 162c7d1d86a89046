"""What tests of the CUDA kernels share. None needs a device; those that compile need CuPy and NVRTC."""

import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from pagewire.kernels.cuda import compile
from pagewire.kernels.cuda.source import Variant
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedDevice, EmulationError

Check = Callable[[EmulatedDevice], None]

PLANTED = pytest.StashKey[dict[Edit, bool]]()
REGISTERS = pytest.StashKey[dict[Variant, dict[str, int]]]()


@pytest.fixture(params=ORDERS, ids=["in order", "any thread", "any warp", "any warp again"])
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    """The emulation, once for each order of threads."""
    return EmulatedDevice(request.param)


@pytest.fixture
def catch(request: pytest.FixtureRequest) -> Callable[[Check, Edit], None]:
    """Plants a fault, and fails unless the check does in one of the orders. What was caught is counted."""

    def run(check: Check, edit: Edit) -> None:
        planted = request.config.stash.setdefault(PLANTED, {})
        planted[edit] = False
        # New memory then holds NaN rather than, maybe, the right results of the run before.
        torch.use_deterministic_algorithms(True, warn_only=True)
        request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
        for order in ORDERS:
            try:
                check(EmulatedDevice(order, (edit,)))
            except (AssertionError, EmulationError):
                planted[edit] = True
                return
        pytest.fail(f"nobody noticed that {edit.old!r} became {edit.new!r}")

    return run


@pytest.fixture
def registers(request: pytest.FixtureRequest) -> dict[Variant, dict[str, int]]:
    """Registers of each variant by architecture: fill it in, and the test run prints it."""
    return request.config.stash.setdefault(REGISTERS, {})


@pytest.fixture(scope="session")
def nvrtc() -> object:
    """Skips where there is no compiler, unless `PAGEWIRE_TEST_NVRTC` says that there is one."""
    try:
        return compile.nvrtc()
    except compile.CompileError as error:
        if "PAGEWIRE_TEST_NVRTC" in os.environ:
            raise
        pytest.skip(str(error))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show how many planted faults were caught, and what the kernels take."""
    if planted := config.stash.get(PLANTED, {}):
        terminalreporter.section("CUDA kernels: faults planted and caught")
        by_file = Counter(edit.file for edit in planted)
        terminalreporter.line(f"{sum(planted.values())} of {len(planted)} caught: {dict(by_file)}")
    if table := config.stash.get(REGISTERS, {}):
        archs = sorted({arch for row in table.values() for arch in row})
        terminalreporter.section("CUDA kernels: registers per thread, no spills, no local memory")
        width = max(len(variant.name) for variant in table)
        terminalreporter.line(" ".join([" " * width, *(f"{arch:>7}" for arch in archs)]))
        for variant, row in table.items():
            cells = (f"{row.get(arch, '-'):>7}" for arch in archs)
            terminalreporter.line(" ".join([f"{variant.name:{width}}", *cells]))
