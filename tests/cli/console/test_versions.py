"""What `pagewire --version` says of kernels, torch and CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.cli.console import versions
from pagewire.cli.console.versions import ABSENT, CUPY, cuda, kernels
from pagewire.cli.main import main
from pagewire.ipc.version import __version__
from pagewire.kernels.cpu.build import ship, supported_instruction_sets
from pagewire.kernels.native import shipped
from tests.kernels.cpu.test_build import WRITES, fake_compiler

BEST = supported_instruction_sets()[0]


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and first == f"pagewire {__version__}"
    assert [line.split()[0] for line in lines] == ["kernels", "torch", "cuda"]


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ({}, "none: there is no torch"),
        ({"torch": "2.9.1+cpu"}, "none: this torch is built for CPUs"),
        ({"torch": "2.9.1+cu128", CUPY[0]: "14.0.1"}, f"12.8, {CUPY[0]} 14.0.1"),
        ({"torch": "2.9.1", "nvidia-cuda-runtime": "13.0.88"}, "13.0.88, no CuPy"),
        ({"torch": "2.9.1", "nvidia-cuda-runtime-cu12": "12.6.77", CUPY[1]: "14.1"}, f"12.6.77, {CUPY[1]}"),
        ({"torch": "2.9.1"}, "unknown, no CuPy"),
    ],
)
def test_cuda(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], said: str) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: packages.get(name, ABSENT))
    assert cuda().startswith(said)


def test_where_kernels_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEWIRE_CPU_ISA", raising=False)
    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, WRITES)))
    assert kernels() == f"{BEST.name}, compiled at the first start"
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    ship(BEST, tmp_path)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert kernels() == f"{BEST.name}, from the wheel"
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "empty")
    assert kernels().startswith("PyTorch's: no compiled kernels")
    monkeypatch.setenv("PAGEWIRE_CPU_ISA", "sse9")
    assert kernels().startswith("none: PAGEWIRE_CPU_ISA=sse9")
