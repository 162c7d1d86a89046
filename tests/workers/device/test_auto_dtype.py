"""What `dtype="auto"` means: by the checkpoint, and by what multiplies its numbers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pagewire.kernels.cpu.build import EMULATED_TILES, INSTRUCTION_SETS, REFERENCE, multiplies_bfloat16
from pagewire.workers.device import auto_dtype as module
from pagewire.workers.device.auto_dtype import auto_dtype
from pagewire.workers.module import configuration
from tests.workers.architectures import Architecture
from tests.workers.driver import load_runner


def test_which_cpus_multiply_bfloat16() -> None:
    names = [isa.name for isa in INSTRUCTION_SETS if multiplies_bfloat16(isa.name)]
    assert names == ["amx_fp16", "amx", "avx512_bf16", "neon_bf16"]
    assert multiplies_bfloat16(EMULATED_TILES) and not multiplies_bfloat16(REFERENCE)


@pytest.mark.parametrize(
    ("checkpoint", "isa", "expected"),
    [
        ("float32", "avx2", "float32"),
        ("float32", "amx", "bfloat16"),
        ("float32", None, "float16"),
        ("float16", "amx", "float16"),
        ("bfloat16", "avx2", "bfloat16"),
        ("bfloat16", None, "bfloat16"),
    ],
)
def test_auto(checkpoint: str, isa: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "multiplies_bfloat16", multiplies_bfloat16)
    assert auto_dtype(checkpoint, isa) == expected


def test_the_log_says_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Architecture("llama").write(tmp_path)
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda isa: True)
    monkeypatch.setattr(configuration, "auto_dtype", auto_dtype)
    caplog.set_level(logging.INFO, "pagewire.worker")
    for dtype, lines in (("auto", 1), ("float32", 0)):
        caplog.clear()
        _, ready = load_runner(folder, dtype=dtype)
        assert ready.dtype == {"auto": "bfloat16", "float32": "float32"}[dtype]
        assert [record.getMessage() for record in caplog.records if "runs in" in record.getMessage()] == [
            "the checkpoint is in float32 and runs in bfloat16, which is faster here; --dtype float32 keeps it"
        ] * lines
