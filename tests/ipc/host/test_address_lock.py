"""One listener per address; what other users have put in the way; what killed processes leave behind."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pagewire.frontend.core.spawn import SpawnedCore
from pagewire.ipc.host.address_lock import AddressLock, lock_path, sweep
from pagewire.ipc.host.lifeline import Child
from pagewire.ipc.wire.sockets import bind_router, private_address, runtime_dir


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s.sock"


def leave_socket(path: Path) -> None:
    """The file of a socket at which nobody listens any more."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


# ---------------------------------------------------------------- one listener per address
HOLD_LOCK = """
import sys
from pagewire.ipc.host.address_lock import AddressLock
lock = AddressLock(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(address: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `address`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    with process:
        yield process
        process.kill()


def test_a_second_lock_names_the_process_that_holds_the_first(
    address: str, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(OSError, match=rf"another core \(pid {holder.pid}\) already listens on {address}"):
        AddressLock(address)


def test_a_killed_process_frees_its_lock(address: str, holder: subprocess.Popen[str]) -> None:
    path = Path(address.removeprefix("ipc://"))
    leave_socket(path)  # that it left behind
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = AddressLock(address)
    assert not path.exists()
    lock.release()


def test_a_lock_within_one_process(address: str) -> None:
    lock = AddressLock(address)
    with pytest.raises(OSError, match=f"pid {os.getpid()}"):
        AddressLock(address)
    lock.release()
    lock.release()
    AddressLock(address).release()
    assert not list(Path(address.removeprefix("ipc://")).parent.iterdir())


def test_a_refused_lock_leaves_the_listeners_socket_alone(address: str) -> None:
    lock = AddressLock(address)
    path = Path(address.removeprefix("ipc://"))
    leave_socket(path)
    with pytest.raises(OSError, match="already listens"):
        AddressLock(address)
    assert path.exists()
    lock.release()
    assert not path.exists()


def test_a_lock_released_just_before_it_is_taken(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is removed between our opening and our locking it: what we locked is nothing."""
    first, flock = AddressLock(address), fcntl.flock

    def release_first(file: Any, operation: int) -> None:
        if operation & fcntl.LOCK_NB:  # the lock of the address, not of its folder
            first.release()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", release_first)
    second = AddressLock(address)
    with pytest.raises(OSError, match="already listens"):
        AddressLock(address)
    second.release()


def test_the_directory_is_made(tmp_path: Path) -> None:
    lock = AddressLock(f"ipc://{tmp_path}/new/s.sock")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    lock.release()


def test_tcp_needs_no_lock() -> None:
    locks = [AddressLock("tcp://127.0.0.1:5555") for _ in range(2)]
    for lock in locks:
        lock.release()


# ---------------------------------------------------------------- what is in the way


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def hard_link(path: Path, target: Path) -> None:
    path.hardlink_to(target)


@pytest.mark.parametrize("make", [link, hard_link])
def test_a_lock_file_that_is_another_file_leaves_that_alone(
    tmp_path: Path, address: str, make: Callable[[Path, Path], None]
) -> None:
    target = tmp_path / "diary"
    target.write_text("1")
    make(tmp_path / "s.sock.lock", target)
    with pytest.raises(PermissionError, match=r"s\.sock\.lock .*remove it"):
        AddressLock(address)
    assert target.read_text() == "1"


def test_a_link_to_nothing_creates_nothing(tmp_path: Path, address: str) -> None:
    (tmp_path / "s.sock.lock").symlink_to(tmp_path / "new")
    with pytest.raises(PermissionError, match="not a regular file"):
        AddressLock(address)
    assert not (tmp_path / "new").exists()


def test_a_file_that_is_no_lock_file_is_not_emptied(tmp_path: Path, address: str) -> None:
    (tmp_path / "s.sock.lock").write_text("my notes")
    with pytest.raises(FileExistsError, match="is not a lock file; remove it, or choose another address"):
        AddressLock(address)
    assert (tmp_path / "s.sock.lock").read_text() == "my notes"


def test_a_pipe_as_a_lock_file_does_not_block(tmp_path: Path, address: str) -> None:
    os.mkfifo(tmp_path / "s.sock.lock", 0o600)
    with pytest.raises(PermissionError, match="not a regular file"):
        AddressLock(address)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_only_a_socket_is_removed_from_the_address(tmp_path: Path, address: str, kind: str) -> None:
    path, precious = tmp_path / "s.sock", tmp_path / "precious"
    precious.write_text("mine")
    {
        "file": lambda: path.write_text("mine"),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(precious),
    }[kind]()
    with pytest.raises(
        FileExistsError, match="is not a socket of yours; remove it, or choose another address"
    ):
        AddressLock(address)
    assert path.exists() and precious.read_text() == "mine"
    assert not lock_path(path).exists()


def test_the_socket_of_another_program_is_left_alone(tmp_path: Path, address: str) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s.sock"))
        other.listen()
        with pytest.raises(OSError, match="another program listens at"):
            AddressLock(address)
        assert (tmp_path / "s.sock").is_socket()


def test_a_folder_that_others_may_write_to_is_refused_unless_it_is_sticky(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(
        PermissionError, match=r"open to other users \(every user may write to it\); use a folder"
    ):
        AddressLock(f"ipc://{folder}/s.sock")
    assert not list(folder.iterdir())
    AddressLock(f"ipc://{folder}/new/s.sock").release()
    folder.chmod(0o1777)
    AddressLock(f"ipc://{folder}/s.sock").release()


# ---------------------------------------------------------------- what killed processes leave behind


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_RPC_BASE_PATH", str(tmp_path))
    return runtime_dir()


def leave(path: Path) -> None:
    """A socket and a lock file as a killed process leaves them."""
    leave_socket(path)
    lock_path(path).write_text("12345")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_left_is_swept_and_what_is_in_use_is_not(folder: Path) -> None:
    leave(folder / "core-1-a.sock")
    leave(folder / "worker-1-a.sock")
    leave_socket(folder / "without-a-lock.sock")
    (folder / "notes.sock").write_text("no socket")
    lock_path(folder / "notes.sock").write_text("no pid")
    with zmq.Context() as context:
        lock = AddressLock(private_address("live"))
        router = bind_router(context, private_address("live"))
        older = bind_router(context, private_address("older"))  # of a version without lock files for workers
        sweep(folder)
        assert names(folder) == {"live.sock", "live.sock.lock", "older.sock", "notes.sock"}
        assert (folder / "notes.sock").read_text() == "no socket"
        router.close()
        older.close()
    lock.release()


def test_a_folder_that_others_can_read_is_not_swept(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    leave(folder / "core.sock")
    sweep(folder)
    assert names(folder) == {"core.sock", "core.sock.lock"}


DIE_WITH_SOCKETS = """
import os, signal, zmq
from pagewire.ipc.host.address_lock import AddressLock
from pagewire.ipc.wire.sockets import bind_router, private_address
for name in ("core", "worker"):
    address = private_address(name)
    lock, router = AddressLock(address), bind_router(zmq.Context.instance(), address)
    globals()[name] = lock, router
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_owner_of_a_killed_core_removes_its_files_and_its_workers(folder: Path) -> None:
    child = Child([sys.executable, "-c", DIE_WITH_SOCKETS])
    assert child.process.wait() == -signal.SIGKILL
    assert names(folder) == {"core.sock", "core.sock.lock", "worker.sock", "worker.sock.lock"}
    SpawnedCore(child, private_address("core")).shutdown()
    assert names(folder) == set()
