"""`pagewire doctor --distributed`: what it measures, and ranks that fail, hang or are wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pagewire.cli.commands import doctor_distributed
from pagewire.cli.main import main
from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.ranks import open as open_module
from pagewire.workers.ranks.check import check
from pagewire.workers.ranks.single import SingleRank


def test_it_measures_what_this_machine_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--distributed"]) == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()[:-1]}
    assert set(lines) == {"memory", "gloo", "nccl"}
    for name in ("memory", "gloo"):
        assert lines[name].startswith("ok ") and "2 ranks" in lines[name] and "GB/s" in lines[name]


def outcome(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> tuple[bool, str]:
    """The result of a group whose ranks run another program."""
    path = folder / "rank.py"
    path.write_text(f"import sys, threading\n{program}\n")
    monkeypatch.setattr(doctor_distributed, "PROBE", (sys.executable, str(path)))
    return doctor_distributed.measured("gloo", 2, None, None)


def test_ranks_that_fail_and_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = "if sys.argv[2] == '0': threading.Event().wait()\nsys.exit('rank 1: OSError: no network')"
    assert outcome(monkeypatch, tmp_path, fails) == (False, "rank 1: OSError: no network")
    monkeypatch.setattr(doctor_distributed, "LIMIT_SECONDS", 2.0)
    hangs = "if sys.argv[2] == '1': threading.Event().wait()"
    assert outcome(monkeypatch, tmp_path, hangs) == (False, "no answer from rank 1 within 2 s")


class Wrong(SingleRank):
    """A group whose sums have an error in one element."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x == x.max())


def test_a_wrong_sum_is_noticed() -> None:
    cpu = torch.device("cpu")
    check(SingleRank(), cpu)
    with pytest.raises(RuntimeError, match=r"rank 0: the sum of 3 numbers of torch.float32 is wrong"):
        check(Wrong(), cpu)


def test_ranks_on_gpus_notice_it_when_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of group that only a machine with several GPUs has is checked at every start."""
    monkeypatch.setattr(open_module, "DistributedGroup", lambda backend, *_: Wrong())
    monkeypatch.setattr(open_module, "check", lambda group, device: check(group, torch.device("cpu")))
    with pytest.raises(RuntimeError, match=r"the sum of 3 numbers of torch\.float32 is wrong"):
        open_module.open_collective(Parallel(rank=0, size=2), torch.device("cuda", 0))
