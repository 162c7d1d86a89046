"""The first start on a machine, where the CPU kernels are not compiled yet, at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from pagewire.kernels.cpu.build import SOURCES
from tests.cli.command import COMMAND, ENVIRONMENT, SMALL_KV
from tests.kernels.cpu.test_build import WRITES, fake_compiler

# Each compiler of the engine's kernels notes its folder and its process, and waits until the file is there.
WAITS = (
    'case "$*" in *" -c "*) echo $TMPDIR > {0}/folder; echo $$ >> {0}/running; '
    "until [ -e {0}/go ]; do sleep 0.02; done;; esac"
)


class PseudoTerminal:
    """A terminal. theirs: the end that commands write to. shown: all that they have written."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self.shown = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the last process has closed the terminal
            while content := os.read(self._ours, 65536):
                with self._changed:
                    self.shown += content.decode()
                    self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        """Wait until a text is shown."""
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.shown, 120), self.shown

    def close(self) -> None:
        os.close(self.theirs)
        self._reader.join()
        os.close(self._ours)


@contextmanager
def a_terminal() -> Iterator[PseudoTerminal]:
    terminal = PseudoTerminal()
    try:
        yield terminal
    finally:
        terminal.close()


def in_terminal(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run a command on a terminal: its exit status, and all that the terminal gets."""
    with a_terminal() as terminal:
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=terminal.theirs,
            stderr=terminal.theirs,
            env=environment,
            timeout=200,
        )
    return done.returncode, terminal.shown


@pytest.fixture
def first(tmp_path: Path) -> dict[str, str]:
    """The environment of a first start, with a compiler that waits; what it writes is no library."""
    compiler = fake_compiler(tmp_path, f"{WAITS.format(tmp_path)}\n{WRITES}")
    cache = {"CXX": str(compiler), "PAGEWIRE_CACHE_ROOT": str(tmp_path / "cache")}
    return {name: value for name, value in ENVIRONMENT.items() if name != "PAGEWIRE_CPU_ISA"} | cache


@contextmanager
def server(
    environment: dict[str, str], terminal: PseudoTerminal
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of the demo model with its log on the terminal, and its address."""
    command = [*COMMAND, "serve", "demo", "--port", "0", *SMALL_KV]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=terminal.theirs, env=environment, text=True
    )
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        assert words[:1] == ["ready"], terminal.shown
        yield process, words[1]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.stdout.close()
        process.wait(60)


def complete(url: str) -> int:
    """The number of tokens of a completion."""
    body = json.dumps({"model": "demo", "prompt": "The", "max_tokens": 4}).encode()
    with urlopen(Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def folder_of_compilers(place: Path) -> Path:
    """Wait until a compiler runs, and return the folder of its files. place: where it notes it."""
    while not (place / "running").exists():
        time.sleep(0.02)
    return Path((place / "folder").read_text().strip())


def is_alive(pid: int) -> bool:
    """True if a process runs; one that has ended, and waits for its parent, does not."""
    try:
        return re.search(r"\) [^ZX] ", Path(f"/proc/{pid}/stat").read_text()) is not None
    except OSError:
        return False


def test_a_terminal_shows_how_many_parts_are_compiled(tmp_path: Path) -> None:
    environment = ENVIRONMENT | {
        "CXX": str(fake_compiler(tmp_path, WRITES)),  # what it writes is no library, so PyTorch serves
        "PAGEWIRE_CACHE_ROOT": str(tmp_path / "cache"),
        "PAGEWIRE_CPU_ISA": "portable",
    }
    status, shown = in_terminal(environment, "generate", "The", "--max-tokens", "2", *SMALL_KV)
    lines = shown.split("\r\x1b[K")
    parts = [line.split(": ")[1].split(" in ")[0] for line in lines if " parts in " in line]
    assert status == 0 and parts == [f"{part} of {len(SOURCES)} parts" for part in range(1, len(SOURCES) + 1)]
    assert "once for this machine" in lines[1]
    [then] = [line for line in lines if "using PyTorch instead" in line]
    assert " parts in " not in then, "the line is cleared"


def test_a_server_of_the_demo_answers_while_its_kernels_are_compiled(
    first: dict[str, str], tmp_path: Path
) -> None:
    with a_terminal() as terminal, server(first, terminal) as (_, url):
        assert "serve from the next start" in terminal.shown
        assert complete(url) == 4 and not (tmp_path / "go").exists()
        (tmp_path / "go").touch()
        terminal.wait_for("compiled the CPU kernels for")
        assert complete(url) == 4
    assert list((tmp_path / "cache" / "kernels").glob("cpu-*.so")), "the next start has them"


def test_compilers_end_with_the_server(first: dict[str, str], tmp_path: Path) -> None:
    with a_terminal() as terminal, server(first, terminal):
        folder = folder_of_compilers(tmp_path)
        assert folder.is_dir()
    pids = [int(pid) for pid in (tmp_path / "running").read_text().split()]
    assert pids and not any(map(is_alive, pids)) and not folder.exists()


def test_compilers_end_with_a_server_that_is_killed(first: dict[str, str], tmp_path: Path) -> None:
    with a_terminal() as terminal, server(first, terminal) as (process, _):
        folder_of_compilers(tmp_path)
        process.kill()
    # The terminal is closed by the last process that has it, which the end of the context has waited for.
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "running").read_text().split())


def test_a_short_command_compiles_nothing(first: dict[str, str], tmp_path: Path) -> None:
    status, shown = in_terminal(first, "generate", "The", "--max-tokens", "2", *SMALL_KV)
    assert status == 0 and "`pagewire serve demo` compiles them" in shown
    assert not (tmp_path / "running").exists()


@pytest.mark.parametrize("stated", ["PAGEWIRE_CPU_ISA", "no terminal"])
def test_whoever_names_the_kernels_or_has_no_terminal_waits(
    first: dict[str, str], tmp_path: Path, stated: str
) -> None:
    (tmp_path / "go").touch()
    command = ("generate", "The", "--max-tokens", "2", *SMALL_KV)
    if stated == "no terminal":
        done = subprocess.run(
            [*COMMAND, *command], env=first, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        status, shown = done.returncode, done.stderr
    else:
        status, shown = in_terminal(first | {stated: "portable"}, *command)
    assert status == 0 and "serve from the next start" not in shown
    assert len((tmp_path / "running").read_text().split()) >= len(SOURCES)
