"""Signs of life while a worker loads: they come with work, and only with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from pagewire.workers.loading_signs import LoadingSigns, work_done, work_of


def test_work_of_this_process_and_its_group_counts() -> None:
    group = os.getpgrp()
    before = work_of(Path("/proc/self"), group)
    while work_of(Path("/proc/self"), group) < before + 5:
        sum(range(10000))
    assert work_done(group) >= 5
    assert work_of(Path("/proc/self"), group + 1) == work_of(Path("/proc/0"), group) == 0


def test_a_process_that_waits_gives_no_sign() -> None:
    program = (
        "import os, threading; from pagewire.workers.loading_signs import LoadingSigns; signs = []\n"
        "with LoadingSigns(lambda: signs.append(1), 0.3):\n"
        "    threading.Event().wait(1.0)\n"
        "print(len(signs))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, start_new_session=True, check=True
    )
    assert int(done.stdout) == 0


def test_work_gives_signs_until_the_end() -> None:
    signs = threading.Semaphore(0)
    with LoadingSigns(signs.release, 0.2) as loading:
        for _ in range(2):
            while not signs.acquire(blocking=False):
                sum(range(10000))
    assert not loading._thread.is_alive()
