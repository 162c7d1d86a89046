"""Work that can wait goes behind the processes that serve, and these take short turns, with all their threads."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from pagewire.ipc.host.priority import AUTOGROUP, SHORT_TURN_NS

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
PRINT = (
    "import os; from pagewire.ipc.host.priority import AUTOGROUP, go_behind; go_behind(5); "
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


PRINT_TURNS = """
import ctypes, platform, threading
from pagewire.ipc.host.priority import SCHED_ATTR, go_behind, take_short_turns, take_usual_turns
def show():
    attributes = ctypes.create_string_buffer(SCHED_ATTR.size)
    ctypes.CDLL(None).syscall(GETATTR[platform.machine()], 0, attributes, SCHED_ATTR.size, 0)
    print(SCHED_ATTR.unpack(attributes.raw)[5])
def of_a_thread():
    thread = threading.Thread(target=show)
    thread.start()
    thread.join()
show()
take_short_turns()
of_a_thread()
take_usual_turns()
of_a_thread()
take_short_turns()
go_behind(5)
show()
""".replace("GETATTR", repr(SCHED_GETATTR))


@pytest.mark.skipif(
    platform.machine() not in SCHED_GETATTR, reason="the number of the system call is not known"
)
def test_short_turns_are_those_of_all_threads_until_a_process_computes() -> None:
    done = subprocess.run([sys.executable, "-c", PRINT_TURNS], stdout=subprocess.PIPE, text=True, check=True)
    before, *turns = map(int, done.stdout.split())
    if before == 0:
        pytest.skip("the kernel knows no turns of a thread's own, or does not tell")
    assert turns == [SHORT_TURN_NS, before, before]
