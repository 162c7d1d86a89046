"""Children end with their parents, however those end. Everything is waited for on pipes, nothing by time."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pagewire.ipc.host.lifeline import Child, wait_for_end

CHILD = """
import os, signal, sys
from pagewire.ipc.host.lifeline import die_with_parent
fd = int(sys.argv[sys.argv.index("--lifeline") + 1])
BEFORE
die_with_parent(fd)
print(os.getpid(), flush=True)
while True:
    pass
"""
PARENT = """
import subprocess, sys
from pagewire.ipc.host.lifeline import Child
child = Child([sys.executable, "-c", sys.argv[1]], stdout=sys.stdout)
sys.stdin.read()
"""
BUSY = CHILD.replace("BEFORE", "")
DEAF = CHILD.replace("BEFORE", "signal.signal(signal.SIGTERM, signal.SIG_IGN)").replace(
    "die_with_parent(fd)\n", ""
)
SILENT = 'import sys; sys.exit(int(sys.stdin.read() or "7"))'


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Reading end for the test, writing end for a child: it ends when the child and all of its ends are gone."""
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)


def spawn(source: str, pipe: tuple[int, int]) -> Child:
    """A child that runs, and has said so."""
    child = Child([sys.executable, "-c", source], stdout=pipe[1])
    os.close(pipe[1])
    assert int(line_of(pipe[0])) == child.pid
    return child


def line_of(fd: int) -> bytes:
    """One line: a child that does not buffer (PYTHONUNBUFFERED) may write its end on its own."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(fd, 1)
    return line


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_busy_child_ends_when_its_parent_is_killed(how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        parent.send_signal(how)
        parent.wait()
        assert parent.stdout.read() == b"", "the pipe ends when the child, which holds it too, has ended"
    assert child_pid != parent.pid


def test_a_child_ends_when_its_parent_ends_well() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        parent.stdout.readline()
        parent.stdin.close()
        assert parent.stdout.read() == b""
        assert parent.wait() == 0


def test_cutting_the_lifeline_ends_the_child(pipe: tuple[int, int]) -> None:
    child = spawn(BUSY, pipe)
    assert child.poll() is None
    assert child.stop(timeout=30) == 0
    assert os.read(pipe[0], 1) == b"" and child.poll() == 0


def test_a_child_that_does_not_stop_is_killed(pipe: tuple[int, int]) -> None:
    child = spawn(DEAF, pipe)
    assert child.stop(timeout=0.01) == -signal.SIGKILL


def test_killing(pipe: tuple[int, int]) -> None:
    child = spawn(BUSY, pipe)
    assert child.kill() == -signal.SIGKILL
    assert child.kill() == child.stop(timeout=1) == -signal.SIGKILL


def test_a_child_whose_owner_is_forgotten_ends(pipe: tuple[int, int]) -> None:
    child = spawn(BUSY, pipe)
    process = child.process
    del child
    assert process.wait() == 0


def test_what_a_child_reads(pipe: tuple[int, int]) -> None:
    child = Child([sys.executable, "-c", SILENT], stdin=b"5", stdout=pipe[1])
    os.close(pipe[1])
    assert child.process.wait() == 5
    assert Child([sys.executable, "-c", SILENT]).process.wait() == 7  # nothing to read


def test_a_child_that_ends_before_it_reads() -> None:
    child = Child([sys.executable, "-c", "raise SystemExit(3)"], stdin=bytes(1 << 20))
    assert child.process.wait() == 3


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        Child(["/no/such/command"])


def test_a_child_has_a_group_of_its_own(pipe: tuple[int, int]) -> None:
    """Ctrl-C at the terminal reaches the parent alone."""
    child = spawn(BUSY, pipe)
    assert os.getpgid(child.pid) == child.pid != os.getpgrp()
    if sys.version_info >= (3, 11):
        assert os.getsid(child.pid) == os.getsid(0)
    child.kill()
    alone = Child([sys.executable, "-c", "import time; time.sleep(60)"], own_session=True)
    assert os.getsid(alone.pid) == alone.pid
    alone.kill()


def test_children_do_not_hold_each_others_lifelines(pipe: tuple[int, int]) -> None:
    first = spawn(BUSY, pipe)
    other_pipe = os.pipe()
    second = spawn(BUSY, other_pipe)
    first.release()
    assert os.read(pipe[0], 1) == b""
    assert second.poll() is None
    second.kill()
    os.close(other_pipe[0])


def test_whether_the_parent_is_gone() -> None:
    read_fd, write_fd = os.pipe()
    assert not wait_for_end(read_fd, 0)
    os.close(write_fd)
    assert wait_for_end(read_fd, 0) and wait_for_end(read_fd)
    os.close(read_fd)


def test_a_descriptor_that_select_cannot_watch() -> None:
    """A child takes its parent's number, which in a server with many connections is large."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        read_fd, write_fd = os.pipe()
        large_fd = fcntl.fcntl(read_fd, fcntl.F_DUPFD_CLOEXEC, 1500)
        assert large_fd >= 1500 and not wait_for_end(large_fd, 0)
        os.close(write_fd)
        assert wait_for_end(large_fd, 0)
        os.close(large_fd)
        os.close(read_fd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
