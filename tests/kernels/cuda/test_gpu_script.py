"""`benchmarks/gpu_all.sh`, rehearsed on the emulated device: it works, and a part that fails hides no other one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels.cuda.launch import HOPPER
from pagewire.kernels.cuda.limits import LATENTS
from pagewire.kernels.cuda.trials import trials
from pagewire.kernels.cuda.variants import Launches
from tests.benchmarks.loading import load_from
from tests.kernels.cuda.emulate import EmulatedLauncher

ROOT = Path(__file__).parents[3]
case, rows = map(partial(load_from, "kernels"), ("case", "rows"))
parts = load_from("gpu", "parts")
ENGINES = (
    "model 1b",
    "model 8b",
    "beside generate_batch",
    "model experts",
    "model adapters",
    "encoder",
    "encoder speed",
)
"""Parts that start engines, which takes long: CI rehearses these where the script has changed."""


def write_wheel(folder: Path) -> None:
    """A package that is not installed."""
    name = "pagewire_rehearsal"
    texts = {
        f"{name}.py": "",
        f"{name}-1.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{name}-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}-1.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        for file, text in texts.items():
            wheel.writestr(file, text)
    (folder / "pytest-0-py3-none-any.whl").touch()  # is installed, so its file is not read


def test_every_trial_is_in_a_part() -> None:
    program = (
        "import json; from benchmarks.gpu.__main__ import TRIED; print(json.dumps(sum(TRIED.values(), ())))"
    )
    tried = json.loads(subprocess.check_output([sys.executable, "-c", program], cwd=ROOT))
    launches = Launches(torch.bfloat16, torch.bfloat16, 64, mixture=True, recurrent=True)
    kinds = (
        launches._replace(capability=HOPPER),
        launches._replace(capability=(8, 9)),
        launches._replace(head_dim=min(LATENTS), indexed=True),
        launches._replace(packed=False, invariant=True),
    )
    assert set(tried) == {trial.method for kind in kinds for trial in trials(kind)}


def test_a_rehearsal(tmp_path: Path) -> None:
    write_wheel(tmp_path)
    out = tmp_path / "results.json"
    skipped = [argument for name in ENGINES for argument in ("--skip", name)]
    command = ["bash", str(ROOT / "benchmarks" / "gpu_all.sh"), "--dry-run", "--wheels", str(tmp_path)]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        [*command, "--out", str(out), *skipped],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = {part["part"]: part for part in json.loads(out.read_text())["parts"]}
    verdicts = {name: part["verdict"] for name, part in results.items() if part["verdict"] != "ok"}
    assert set(verdicts) <= {"compiler", "memcheck", "racecheck"} and set(verdicts.values()) <= {"skip"}
    assert results["wheels"]["figures"]["installed"] == ["pagewire_rehearsal-1-py3-none-any.whl"]
    assert results["speed decode"]["figures"]["cases"]["decode 3 x 64 bfloat16"]["good"]
    assert len(results) > 20 and out.stat().st_size < 300_000
    table = done.stdout.splitlines()[-len(results) - 2 :]
    assert [line[:24].strip() for line in table[: len(results)]] == list(results)
    assert table[-2] == f"{len(results)} of {len(results)} parts without a failure"


def fails() -> dict[str, Any]:
    print("before")
    raise ValueError("the first line\nand more")


def skips() -> dict[str, Any]:
    raise parts.SkipError("there is nothing to do")


@pytest.mark.parametrize(
    ("run", "verdict", "error"),
    [
        (lambda: {"figure": 1}, "ok", ""),
        (fails, "FAIL", "ValueError: the first line"),
        (skips, "skip", "there is nothing to do"),
        (lambda: sys.exit(3), "FAIL", "SystemExit: 3"),
        (lambda: os._exit(4), "FAIL", "exit status 4"),
        (os.abort, "FAIL", "ended by SIGABRT"),
        (threading.Event().wait, "TIME", "not done after 1 s"),
    ],
    ids=["right", "raises", "skips", "exits", "ends", "crashes", "hangs"],
)
def test_what_comes_of_a_part(run: Callable[[], Any], verdict: str, error: str) -> None:
    """Whatever it is, the process that runs the parts goes on."""
    outcome = parts.run_part(parts.Part("name", 1.0 if verdict == "TIME" else 60.0, run), 100.0)
    assert (outcome.verdict, outcome.error) == (verdict, error)
    assert outcome.figures == ({"figure": 1} if verdict == "ok" else {})
    if run is fails:
        assert outcome.output.startswith("before\nTraceback") and "and more" in outcome.output


def test_a_part_for_which_no_time_is_left_is_a_failure(tmp_path: Path) -> None:
    outcomes = [parts.run_part(parts.Part("late", 60.0, fails), 1.0), parts.Outcome("early", "ok", 2.0)]
    assert [outcome.is_bad for outcome in outcomes] == [True, False]
    lines = parts.summary(outcomes).splitlines()
    assert lines[0].split() == ["late", "left", "out", "0.0", "s", "no", "time", "is", "left"]
    assert lines[-1] == "1 of 2 parts without a failure"
    parts.write_results(tmp_path / "new" / "file.json", {"date": "today"}, outcomes)
    written = json.loads((tmp_path / "new" / "file.json").read_text())
    assert written["date"] == "today" and [part["part"] for part in written["parts"]] == ["late", "early"]


def test_a_wrong_kernel_exceeds_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "ROTATED_BYTES", 1)
    monkeypatch.setattr(rows.norms, "rms_norm", lambda launcher, x, *_, **__: x)
    wrong = next(rows.row_cases(EmulatedLauncher(), "cpu", case.Extent.SMALL))
    assert wrong.error() > wrong.tolerance
