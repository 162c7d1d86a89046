"""Where there is no Linux, what starts an engine says so; what attaches to one does not ask."""

from __future__ import annotations

import sys

import pytest

from pagewire.cli.main import main
from pagewire.frontend.core.spawn import spawn_core
from pagewire.ipc.options.engine_args import EngineArgs


@pytest.fixture(autouse=True)
def a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


def test_no_core_is_spawned() -> None:
    with pytest.raises(OSError, match="an engine runs on Linux, and this system is darwin: attach"):
        spawn_core(EngineArgs(model="demo"))


@pytest.mark.parametrize("command", [["core"], ["worker", "--join", "tcp://127.0.0.1:1"]], ids=" ".join)
def test_the_commands_of_an_engine_say_why(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    assert "an engine runs on Linux, and this system is darwin" in capsys.readouterr().err
