"""Tiny random checkpoints, and runners on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.workers.device import auto_dtype
from pagewire.workers.estimate import figures
from pagewire.workers.module import configuration
from pagewire.workers.process import wiring
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice, emulated
from tests.workers.architectures import GROUPED, Architecture
from tests.workers.driver import load_runner

LLAMA = Architecture("llama", GROUPED)


@pytest.fixture(scope="session", autouse=True)
def keep_float32() -> Iterator[None]:
    """Checkpoints in float32 run in float32, on CPUs too that multiply bfloat16: transformers is the oracle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_dtype, "multiplies_bfloat16", lambda isa: False)
        for module in (configuration, figures):  # nor in float16 on GPUs
            patch.setattr(module, "auto_dtype", lambda checkpoint, isa: checkpoint)
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama."""
    return LLAMA.write(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runner(llama: Path) -> Runner:
    """A fresh runner of it."""
    return load_runner(llama)[0]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedCudaDevice]:
    """An emulated GPU of 4 GiB, which all runners get that are loaded."""
    own = EmulatedCudaDevice(EmulatedLauncher())
    monkeypatch.setattr(wiring, "open_device", lambda config: own)
    with emulated(own.kernels):
        yield own
