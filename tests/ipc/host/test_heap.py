"""Memory that a process frees goes back to the system."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from pathlib import Path
from pagewire.ipc.host.heap import return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) >> 8  # MiB

if sys.argv[1] == "returned":
    return_freed_memory()
kept = []
before = resident()
for _ in range(2):  # the first free of a large block is what raises glibc's threshold
    large = []
    for _ in range(200):
        large.append(b"x" * (1 << 20))
        kept.append(bytearray(600))  # a small block behind each large one
    full = resident()
    del large
print(full - before, resident() - before)
"""


def growth(how: str) -> tuple[int, int]:
    """MiB that a process has grown by with 200 large blocks, and after they are freed."""
    command = [sys.executable, "-c", PROGRAM, how]
    full, after = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(full), int(after)


def test_freed_blocks_are_returned() -> None:
    full, after = growth("returned")
    assert full >= 200 and after < 20
