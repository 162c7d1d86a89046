"""One listener for each `ipc://` address, and the removal of what killed listeners have left behind.

libzmq would silently take over a path that another process has bound. So a listener first locks `PATH.lock`, which
the system frees with the process, however that ends. A lock file that is not locked is therefore left over from a
process that was killed, and so is its socket.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pagewire.ipc.host.owned import check_folder, open_owned, remove_socket

SUFFIX = ".lock"
MAX_LOCK_BYTES = 20  # a lock file holds a process id


class AddressLock:
    """A file lock that allows one listener per `ipc://` address. For TCP it does nothing.

    A socket file that exists once the lock is held is stale, and is removed. Nothing else is: neither another kind
    of file nor another user's, and no link is followed.

    Raises:
        PermissionError: other users can change the folder or the lock file.
        OSError: another process listens at the address (the text has its pid), or another file has its path.
    """

    def __init__(self, address: str) -> None:
        self._descriptor = -1
        if not address.startswith("ipc://"):
            return
        self._path = Path(address.removeprefix("ipc://"))
        self._lock_path = lock_path(self._path)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(self._path.parent)
        with exclusive(self._path.parent):
            descriptor = self._acquire(address)
        try:
            remove_socket(self._path)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        except BaseException:
            self._lock_path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _acquire(self, address: str) -> int:
        while True:
            descriptor = open_owned(self._lock_path, os.O_RDWR | os.O_CREAT)
            try:
                content = os.pread(descriptor, MAX_LOCK_BYTES + 1, 0)
                if content.strip(b"0123456789"):
                    raise FileExistsError(
                        f"{self._lock_path} is not a lock file; remove it, or choose another address"
                    )
                if not try_lock(descriptor):
                    pid = content.decode() or "unknown"
                    raise OSError(f"another core (pid {pid}) already listens on {address}")
                if is_at(descriptor, self._lock_path):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(
                descriptor
            )  # the holder deleted the file after it was opened: try again with the new one

    def release(self) -> None:
        """Remove the socket file and release the lock. May be called twice."""
        if self._descriptor < 0:
            return
        remove_left_over(self._path, self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1


def lock_path(path: Path) -> Path:
    """The lock file of a socket."""
    return path.with_name(path.name + SUFFIX)


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process. Returns False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """True if an open file is the one that now has the name `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """A context in which no other process takes or removes locks in a folder, if that is private to this user.

    In other folders nothing is swept, and another user could hold the folder's lock for ever: nothing is locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if is_private(os.fstat(descriptor)):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_private(info: os.stat_result) -> bool:
    """True for a folder of this user that no other user can read."""
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def sweep(folder: Path) -> None:
    """Remove the sockets and lock files that killed processes have left in a folder that is private to this user.

    In a folder that others can read, nothing is done: `remove_left_overs_of` removes those of one address.
    """
    if not is_private(folder.lstat()):
        return
    with exclusive(folder):
        for lock in folder.glob(f"*{SUFFIX}"):
            remove_left_overs_of(lock.with_name(lock.name.removesuffix(SUFFIX)))
        for path in folder.glob("*.sock"):
            if not lock_path(path).exists():
                with suppress(OSError):
                    remove_socket(path)


def listening(folder: Path) -> dict[Path, int | None]:
    """The sockets in a folder that is private to this user at which a process listens, and the process's id."""
    found: dict[Path, int | None] = {}
    with exclusive(folder):
        for lock in folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):
                descriptor = open_owned(lock, os.O_RDWR)
                try:
                    if not try_lock(descriptor):
                        content = os.pread(descriptor, MAX_LOCK_BYTES, 0)
                        found[lock.with_name(lock.name.removesuffix(SUFFIX))] = int(content or 0) or None
                finally:
                    os.close(descriptor)
    return found


def remove_left_overs_of(path: Path) -> None:
    """Remove a socket and its lock file, unless a process holds the lock. Other kinds of files are left alone."""
    with suppress(OSError):
        descriptor = open_owned(lock_path(path), os.O_RDWR)
        try:
            if try_lock(descriptor) and is_at(descriptor, lock_path(path)):
                remove_left_over(path, descriptor)
        finally:
            os.close(descriptor)


def remove_left_over(path: Path, descriptor: int) -> None:
    """Remove a socket and its lock file, which is open and locked as `descriptor`."""
    with suppress(OSError):
        if stat.S_ISSOCK((info := path.lstat()).st_mode) and info.st_uid == os.geteuid():
            path.unlink()
    with suppress(OSError):
        if is_at(descriptor, lock_path(path)):
            lock_path(path).unlink()
