"""Fixtures for the tests of the CUDA kernels, which need no GPU; those that compile need CuPy and NVRTC."""

import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from pagewire.kernels.cuda import compile, linear
from pagewire.kernels.cuda.source import Variant
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, EmulationError

Check = Callable[[EmulatedLauncher], None]

PLANTED = pytest.StashKey[dict[Edit, bool]]()
REGISTERS = pytest.StashKey[dict[Variant, dict[str, int]]]()


@pytest.fixture(params=ORDERS, ids=["in order", "any thread", "any warp", "any warp again"])
def launcher(request: pytest.FixtureRequest) -> EmulatedLauncher:
    """An emulated device, for each order of threads."""
    return EmulatedLauncher(request.param)


@pytest.fixture
def catch(request: pytest.FixtureRequest) -> Callable[[Check, Edit], None]:
    """A function that plants a fault and fails unless the check fails in some order. It counts caught faults."""

    def run(check: Check, edit: Edit) -> None:
        planted = request.config.stash.setdefault(PLANTED, {})
        planted[edit] = False
        # New memory then holds NaN; otherwise it may hold the right results of the run before.
        torch.use_deterministic_algorithms(True, warn_only=True)
        request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
        for order in ORDERS:
            try:
                check(EmulatedLauncher(order, (edit,)))
            except (AssertionError, EmulationError):
                planted[edit] = True
                return
        pytest.fail(f"no check failed with {edit.new!r} in place of {edit.old!r}")

    return run


@pytest.fixture
def registers(request: pytest.FixtureRequest) -> dict[Variant, dict[str, int]]:
    """Registers of each variant by architecture. A test fills it in; the summary of the test run prints it."""
    return request.config.stash.setdefault(REGISTERS, {})


@pytest.fixture(scope="session")
def nvrtc() -> object:
    """NVRTC. Skips the test where it is not installed, unless `PAGEWIRE_TEST_NVRTC` is set."""
    try:
        return compile.nvrtc()
    except compile.CompileError as error:
        if "PAGEWIRE_TEST_NVRTC" in os.environ:
            raise
        pytest.skip(str(error))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the number of planted faults that were caught, and the registers of the kernels."""
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


@pytest.fixture(scope="module")
def many_from_65_rows_on() -> Iterator[None]:
    """Products of more rows take the kernel for many, as they do on a GPU where that is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "MOST_FEW", 64)
        yield
