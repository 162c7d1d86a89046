"""The first start on a machine, where the CPU kernels are compiled: a terminal shows how far that is."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
from pathlib import Path

from pagewire.kernels.cpu.build import SOURCES
from tests.cli.command import COMMAND, ENVIRONMENT, SMALL_KV
from tests.kernels.cpu.test_build import WRITES, fake_compiler


def in_terminal(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run a command on a terminal: its exit status, and all that the terminal gets."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while content := os.read(ours, 65536):
                shown.extend(content)
        except OSError:  # the last process has closed the terminal
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        command = [*COMMAND, *arguments]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment, timeout=200
        )
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return done.returncode, shown.decode()


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
    assert "once for this machine" in lines[1] and "using PyTorch instead" in lines[-1], "the line is cleared"
