"""The cases of `benchmarks.kernels` compute the right results on the emulated device, at small sizes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from pagewire.kernels.cuda.launch import KernelLauncher
from tests.benchmarks.loading import load_from
from tests.kernels.cuda.emulate import EmulatedLauncher

adapters, attention, cache_writes, case, rows, sampling = map(
    partial(load_from, "kernels"), ("adapters", "attention", "cache_writes", "case", "rows", "sampling")
)
SMALL = attention.Shape(4, 2, 64)


def small_attention(launcher: KernelLauncher) -> Iterator[Any]:
    for name, queries, context, requests, kept in (
        ("decode", 1, 63, 3, torch.bfloat16),
        ("decode fp8", 1, 40, 2, torch.float8_e4m3fn),
        ("prefill", 32, 0, 1, torch.bfloat16),
        ("prefill after", 32, 50, 1, torch.bfloat16),
    ):
        yield attention.attention_case(launcher, "cpu", name, queries, context, requests, kept, SMALL)
    yield attention.attention_case(
        *(launcher, "cpu", "encoder", 48, 0, 2, torch.bfloat16, attention.Shape(2, 2, 64)), whole=True
    )


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "ROTATED_BYTES", 1)


def check(cases: Iterator[Any]) -> None:
    """Errors are within bounds, and peers run."""
    for each in cases:
        assert each.error() <= each.tolerance, each.name
        assert each.num_bytes > 0 and each.copies >= 1
        for run in each.peers.values():
            run(0)


def test_attention() -> None:
    check(small_attention(EmulatedLauncher()))


def test_writes_rows_and_sampling() -> None:
    launcher = EmulatedLauncher()
    for kept, normed in ((torch.bfloat16, True), (torch.float8_e4m3fn, False)):
        check(iter([cache_writes._write_case(launcher, "cpu", 24, kept, normed, SMALL)]))
    check(rows.row_cases(launcher, "cpu", False, tokens=3))
    check(adapters.lora_cases(launcher, "cpu", False, size=72, rows=(1, 33)))
    check(sampling.sampling_cases(launcher, "cpu", False, rows=3, vocab_sizes=(2048,)))


def test_a_wrong_kernel_exceeds_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.norms, "rms_norm", lambda launcher, x, *_, **__: x)
    wrong = next(rows.row_cases(EmulatedLauncher(), "cpu", False, tokens=3))
    assert wrong.error() > wrong.tolerance
