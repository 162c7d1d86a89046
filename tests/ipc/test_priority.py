"""Work that can wait goes behind the processes that serve, in sessions of their own as well."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pagewire.ipc.priority import AUTOGROUP

PRINT = (
    "import os; from pagewire.ipc.priority import AUTOGROUP, go_behind; go_behind(5); "
    "print(os.nice(0), AUTOGROUP.read_text() if AUTOGROUP.exists() else '')"
)


def test_a_process_and_its_session_go_behind() -> None:
    command = [sys.executable, "-c", PRINT]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True)
    nice, *group = done.stdout.split()
    assert int(nice) >= 5
    if not os.access(AUTOGROUP, os.W_OK):
        pytest.skip("the kernel schedules no sessions as groups")
    assert group[1:] == ["nice", "5"]
