"""Workers on devices with CUDA kernels: emulated ones, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.reference.kernels import reference
from pagewire.workers.process import wiring
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice, emulated
from tests.workers.architectures import Architecture
from tests.workers.driver import load_runner

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96}
SIZES: dict[str, Any] = {
    "device": "cuda",
    "block_size": 16,
    "max_num_seqs": 6,
    "num_blocks": 24,
    "max_num_batched_tokens": 63,  # no step with prompts is recorded
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Architecture("llama", HEADS).write(tmp_path_factory.mktemp("llama"), dtype="bfloat16")


@pytest.fixture(params=["emulated", "gpu"])
def load(
    request: pytest.FixtureRequest, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Runner]]:
    """Makes runners. Products do not depend on the number of rows, as cuBLAS's may."""
    monkeypatch.setattr(CudaKernels, "pack", lambda self, weight, bias=None: reference.pack(weight, bias))
    if request.param == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")
        yield lambda folder=llama, **fields: load_runner(folder, **(SIZES | fields))[0]
        return
    launcher = EmulatedLauncher()
    monkeypatch.setattr(wiring, "open_device", lambda load: EmulatedCudaDevice(launcher))
    with emulated(launcher):
        yield lambda folder=llama, **fields: load_runner(folder, **(SIZES | fields))[0]
