"""Signs of life while a worker loads: they come with work, and only with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.wire.worker_messages import WorkerCall
from pagewire.workers.process import main
from pagewire.workers.process.progress_signs import ProgressSigns, work_done, work_of


def test_work_of_this_process_and_its_group_counts() -> None:
    group = os.getpgrp()
    before = work_of(Path("/proc/self"), group)
    while work_of(Path("/proc/self"), group) < before + 5:
        sum(range(10000))
    assert work_done(group) >= 5
    assert work_of(Path("/proc/self"), group + 1) == work_of(Path("/proc/0"), group) == 0


def test_a_process_that_waits_gives_no_sign() -> None:
    program = (
        "import os, threading; from pagewire.workers.process.progress_signs import ProgressSigns; signs = []\n"
        "with ProgressSigns(lambda: signs.append(1), 0.3):\n"
        "    threading.Event().wait(1.0)\n"
        "print(len(signs))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, start_new_session=True, check=True
    )
    assert int(done.stdout) == 0


def test_work_gives_signs_until_the_end() -> None:
    signs = threading.Semaphore(0)
    with ProgressSigns(signs.release, 0.2) as loading:
        for _ in range(2):
            while not signs.acquire(blocking=False):
                sum(range(10000))
    assert not loading._thread.is_alive()


def test_calls_that_may_take_longer_than_a_step_show_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    connection: Any = type("Connection", (), {"send": lambda self, answer: shown.append("answer")})()
    monkeypatch.setattr(main, "progress_signs", lambda connection: nullcontext(shown.append("signs")))
    for method in ("ping", "no such method", "sleep", "wake_up", "save_sharded_state"):
        shown.append(method)
        main.reply(connection, None, WorkerCall(1, method))
    assert shown == [
        *("ping", "answer", "no such method", "answer"),
        *("sleep", "signs", "answer"),
        *("wake_up", "signs", "answer", "save_sharded_state", "signs", "answer"),
    ]
