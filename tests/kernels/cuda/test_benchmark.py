"""The cases of `benchmarks.kernels` compute the right results on the emulated device, at small sizes."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels.cuda.launch import KernelLauncher
from tests.kernels.cuda.emulate import EmulatedLauncher


def script() -> Any:
    """The benchmark's module, which is in no package."""
    spec = importlib.util.spec_from_file_location(
        "benchmark_kernels", Path(__file__).parents[3] / "benchmarks" / "kernels.py"
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels = script()
SMALL = kernels.Shape(4, 2, 64)


def small_attention(launcher: KernelLauncher) -> Iterator[Any]:
    for name, queries, context, requests, kept in (
        ("decode", 1, 63, 3, torch.bfloat16),
        ("decode fp8", 1, 40, 2, torch.float8_e4m3fn),
        ("prefill", 32, 0, 1, torch.bfloat16),
        ("prefill after", 32, 50, 1, torch.bfloat16),
    ):
        yield kernels.attention_case(launcher, "cpu", name, queries, context, requests, kept, SMALL)
    yield kernels.attention_case(
        *(launcher, "cpu", "encoder", 48, 0, 2, torch.bfloat16, kernels.Shape(2, 2, 64)), whole=True
    )


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ROTATED_BYTES", 1)


def check(cases: Iterator[Any]) -> None:
    """Errors are within bounds, and peers run."""
    for case in cases:
        assert case.error() <= case.tolerance, case.name
        assert case.num_bytes > 0 and case.copies >= 1
        for run in case.peers.values():
            run(0)


def test_attention() -> None:
    check(small_attention(EmulatedLauncher()))


def test_writes_rows_and_sampling() -> None:
    launcher = EmulatedLauncher()
    for kept, normed in ((torch.bfloat16, True), (torch.float8_e4m3fn, False)):
        check(iter([kernels._write_case(launcher, "cpu", 24, kept, normed, SMALL)]))
    check(kernels.row_cases(launcher, "cpu", False, tokens=3))
    check(kernels.lora_cases(launcher, "cpu", False, size=72, rows=(1, 33)))
    check(kernels.sampling_cases(launcher, "cpu", False, rows=3, vocab_sizes=(2048,)))


def test_a_wrong_kernel_exceeds_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.norms, "rms_norm", lambda launcher, x, *_, **__: x)
    case = next(kernels.row_cases(EmulatedLauncher(), "cpu", False, tokens=3))
    assert case.error() > case.tolerance
