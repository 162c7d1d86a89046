"""What a user sees while a model loads: on a terminal, in a log, and of a start that is soon over."""

from __future__ import annotations

import logging
import os
import pty
import threading
from pathlib import Path

import pytest

from pagewire.kernels.cpu.progress import CompileProgress
from pagewire.workers.checkpoint.read_progress import WEIGHTS
from pagewire.workers.process import loading_line
from pagewire.workers.process.loading_line import LoadingLine

CLEARED = "\r\x1b[K"


class Terminal:
    """A terminal that becomes standard error: what is written there is read from the other end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reads, writes = pty.openpty()
        self.stream = os.fdopen(writes, "w")
        self.text = ""
        monkeypatch.setattr("sys.stderr", self.stream)

    def read_until(self, text: str) -> None:
        """Read on until this text has been written."""
        while text not in self.text:
            self.text += os.read(self._reads, 4096).decode()

    def close(self) -> str:
        """Everything that was written."""
        self.stream.close()
        try:
            while data := os.read(self._reads, 4096):
                self.text += data.decode()
        except OSError:  # what Linux says at the end of a terminal that is closed
            pass
        os.close(self._reads)
        return self.text


@pytest.fixture(autouse=True)
def nothing_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pagewire.worker")
    monkeypatch.setattr(WEIGHTS, "done", 0)
    monkeypatch.setattr(WEIGHTS, "total", 0)


def test_the_line_says_what_is_done_and_how_much_is_read() -> None:
    line = LoadingLine("/models/a\nmodel", draws=True)
    assert line.text() == r"loading a\x0amodel: starting, 0 s"
    WEIGHTS.begin(400)
    line.ended("reference")
    assert line.text().endswith("packing weights, 0 s")  # nothing is read so far
    WEIGHTS.done = 100
    line.ended("some part")  # which says nothing of what comes next
    assert line.text().endswith(f"packing weights [{'#' * 6}{'.' * 18}] 25%, 0 s")
    WEIGHTS.done = 500
    assert "[" + "#" * 24 + "] 100%" in line.text()


def test_a_terminal_has_a_line_that_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(loading_line, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(loading_line, "DRAW_SECONDS", 0.0)
    with LoadingLine("models/small", draws=True) as line:
        terminal.read_until(f"{CLEARED}loading small: starting, 0 s\r")
        line.ended("kv")
        terminal.read_until("loading small: first steps")
    assert terminal.close().endswith(CLEARED + "\r")


def test_a_short_start_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(loading_line, "PATIENCE_SECONDS", 600.0)
    with LoadingLine("models/small", draws=True):
        pass
    assert terminal.close() == ""


def test_compiling_has_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    looked = threading.Event()
    monkeypatch.setattr(loading_line, "PATIENCE_SECONDS", 0.0)

    def compiling() -> bool:
        looked.set()
        return is_compiling()

    is_compiling = loading_line.is_compiling
    monkeypatch.setattr(loading_line, "is_compiling", compiling)
    with CompileProgress("kernels", 3), LoadingLine("models/small", draws=True):
        assert looked.wait(60)
    assert "loading" not in terminal.close()
    assert not is_compiling()


@pytest.mark.parametrize("draws", [True, False])
def test_without_a_terminal_the_log_says_it(
    draws: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = threading.Event()
    monkeypatch.setattr(loading_line, "LOG_SECONDS", 0.0)
    with (tmp_path / "errors").open("w") as errors, caplog.at_level(logging.INFO, "pagewire.worker"):
        monkeypatch.setattr("sys.stderr", errors)
        handler = logging.Handler()
        handler.emit = lambda record: said.set()  # type: ignore[method-assign]
        loading_line.logger.addHandler(handler)
        with LoadingLine("models/small", draws=draws):
            assert said.wait(60)
        loading_line.logger.removeHandler(handler)
    assert caplog.messages[0] == "loading small: starting, 0 s"
    assert (tmp_path / "errors").read_text() == ""


def test_a_terminal_that_is_gone_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    terminal.close()
    loading_line.draw("loading")
