"""The cores that this user runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagewire.cli.console import running
from pagewire.cli.console.running import RunningCore, running_cores
from pagewire.cli.main import main
from pagewire.ipc.host.address_lock import AddressLock
from pagewire.ipc.wire.sockets import private_address


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of this user's sockets."""
    monkeypatch.setenv("PAGEWIRE_RPC_BASE_PATH", str(tmp_path))
    return tmp_path / "pagewire"


def test_cores_are_found_by_their_locks(folder: Path) -> None:
    assert running_cores() == []
    (folder / "left.sock.lock").write_text("1")  # of a process that was killed
    (folder / "worker-1.sock").touch()
    lock = AddressLock(private_address("core"))
    try:
        assert running_cores() == [RunningCore(f"ipc://{folder}/core.sock", os.getpid())]
    finally:
        lock.release()
    assert running_cores() == []


@pytest.mark.usefixtures("folder")
def test_top_without_a_core_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once"]) == 1
    assert "no core of this user runs here: `pagewire serve MODEL`" in capsys.readouterr().err


def test_top_lists_several(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "model_of", lambda core: "demo" if "one" in core.address else "(loading)")
    locks = [AddressLock(private_address(name)) for name in ("one", "two")]
    try:
        assert main(["top", "--once"]) == 0
    finally:
        for lock in locks:
            lock.release()
    said = capsys.readouterr()
    pid = str(os.getpid())
    assert [line.split() for line in said.out.splitlines()] == [
        ["SOCKET", "PID", "MODEL"],
        ["one.sock", pid, "demo"],
        ["two.sock", pid, "(loading)"],
    ]
    assert "--attach SOCKET" in said.err
