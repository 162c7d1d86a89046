"""`pagewire doctor` and `pagewire kernels build`, on machines with and without what they need."""

from __future__ import annotations

import shlex
import sys
import types
from pathlib import Path

import pytest

from pagewire.cli.commands import doctor
from pagewire.cli.main import main
from pagewire.kernels.cuda import compile
from pagewire.kernels.data.layer import Activation
from pagewire.kernels.reference.kernels import reference
from tests.cli.command import ENVIRONMENT, pagewire

NAMES = ["driver", "torch", "cupy", "nvrtc", "headers", "compile", "launch", "probes"]


@pytest.fixture
def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if CuPy were not installed."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(compile, "nvrtc", compile.nvrtc.__wrapped__)


@pytest.fixture
def compiler() -> None:
    """Skips where there is none."""
    try:
        compile.nvrtc()
    except compile.CompileError as error:
        pytest.skip(str(error))


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """The lines by check: mark and text."""
    lines = [line for line in capsys.readouterr().out.splitlines()[:-1] if not line.startswith(" " * 16)]
    return {name: (mark, " ".join(text)) for mark, name, *text in map(str.split, lines)}


def test_every_check_has_its_line_and_the_status_is_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--cuda"])
    lines = report(capsys)
    assert list(lines) == NAMES
    marks = {mark for mark, _ in lines.values()}
    assert marks <= {"ok", "FAIL", "-"}
    assert status == (1 if "FAIL" in marks else 0)


def test_it_says_how_to_get_what_is_missing(capsys: pytest.CaptureFixture[str], without_cupy: None) -> None:
    assert main(["doctor", "--cuda"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  cupy      not installed" in out and "pip install 'cupy-cuda12x>=14'" in out
    assert "-     nvrtc     not tried: no CuPy" in out and "-     compile   not tried: no compiler" in out
    assert out.splitlines()[-1].startswith("CUDA kernels cannot run here")


def test_no_driver(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(doctor.ctypes, "CDLL", missing)
    assert main(["doctor", "--cuda"]) == 1
    assert report(capsys)["driver"] == (
        "FAIL",
        "no NVIDIA driver (libcuda.so.1): install one, or give the container access to the GPUs",
    )


def test_a_driver_older_than_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setattr(doctor, "compiler_version", lambda: (13, 0))
    monkeypatch.setattr(doctor, "driver_version", lambda: (12, 4))
    with pytest.raises(
        doctor.CheckError, match=r"13\.0, but the driver supports only CUDA 12\.4:\npip install"
    ):
        list(doctor.check_nvrtc())


def test_a_test_compile(compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(tmp_path))
    (finding,) = doctor.check_compile()
    assert finding.good and "gate<bf16, SILU> for sm_" in finding.text and "registers" in finding.text


def test_a_cache_that_cannot_be_written(
    compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a_file := tmp_path / "file").touch()
    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(a_file))
    with pytest.raises(doctor.CheckError, match=r"the cache cannot be written: .*; set PAGEWIRE_CACHE_ROOT"):
        list(doctor.check_compile())


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch check compares: what a broken device returns is not passed over."""
    import torch

    monkeypatch.setattr(doctor, "why_no_launch", str)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        doctor, "silu_and_mul_on", lambda index, x: reference.activate_and_mul(x, Activation.SILU)
    )
    (finding,) = doctor.check_launch()
    assert finding.good
    monkeypatch.setattr(doctor, "silu_and_mul_on", lambda index, x: torch.zeros(64, 1024))
    with pytest.raises(doctor.CheckError, match="cuda:0: wrong result"):
        list(doctor.check_launch())
    monkeypatch.setattr(doctor, "silu_and_mul_on", lambda index, x: 1 / 0)
    with pytest.raises(doctor.CheckError, match="cuda:0: ZeroDivisionError"):
        list(doctor.check_launch())


def test_a_device_that_computes_otherwise_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(doctor, "why_no_launch", str)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "why_probe_fails", lambda name, index: "")
    assert all(finding.good for finding in doctor.check_probes())
    monkeypatch.setattr(doctor, "why_probe_fails", lambda name, index: "a sum differs" if index else "")
    with pytest.raises(doctor.CheckError, match="cuda:1: a sum differs"):
        list(doctor.check_probes())
    monkeypatch.setattr(doctor, "why_probe_fails", lambda name, index: 1 / 0)
    with pytest.raises(doctor.CheckError, match="cuda:0, fragments of tensor cores: ZeroDivisionError"):
        list(doctor.check_probes())


def test_building_ahead_fills_the_cache(
    compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagewire.kernels.cuda import gates, variants

    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(variants, "MODULES", (gates,))
    assert main(["kernels", "build", "--arch", "sm_90", "--arch", "sm_80", "--jobs", "2"]) == 0
    names = sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "kernels").iterdir())
    assert names == ["cuda-sm_80"] * 6 + ["cuda-sm_90"] * 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--arch", "hopper"], "--arch must have the form sm_90, got 'hopper'"),
        (["--arch", "sm_90", "--jobs", "0"], "--jobs must be at least 1"),
    ],
)
def test_mistakes_are_reported_in_a_line(arguments: list[str], text: str) -> None:
    done = pagewire("kernels", "build", *arguments, env=ENVIRONMENT)
    assert done.returncode == 2 and text in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arch", "text"), [("sm_75", "need compute capability 8.0"), ("sm_99", "does not know sm_99")]
)
def test_an_architecture_that_is_not_served(
    compiler: None, capsys: pytest.CaptureFixture[str], arch: str, text: str
) -> None:
    assert main(["kernels", "build", "--arch", arch]) == 1
    assert text in capsys.readouterr().err


def test_building_without_a_compiler(capsys: pytest.CaptureFixture[str], without_cupy: None) -> None:
    assert main(["kernels", "build", "--arch", "sm_90"]) == 1
    assert "pagewire kernels: CUDA kernels need CuPy" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_judged_by_its_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    monkeypatch.setenv("CXX", shlex.quote(sys.executable))  # a program that tells its version
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[:-1]] == [
        ["ok", "cpu"],
        ["ok", "kernels"],
        ["-", "cuda"],
    ]
    assert out.splitlines()[-1] == "Models run on this CPU."
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  kernels   no C++ compiler (/nowhere/c++)" in out and "50 times slower" in out
    assert out.splitlines()[-1] == "Models run on this CPU, but slowly: see FAIL above."


@pytest.mark.parametrize(
    ("vendor", "kind", "found"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1234", "0x030000", False)],
)
def test_gpus_are_found_without_a_driver(vendor: str, kind: str, found: bool, tmp_path: Path) -> None:
    (tmp_path / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "class").write_text(f"{kind}\n")
    assert doctor.is_nvidia(tmp_path) is found
    assert not doctor.is_nvidia(tmp_path / "nothing")
