"""The folder of packed weights: files by key, of a bounded size, the least recently used removed first.

A file is complete before it gets its name. While it is written it has another name, and its writer has a lock on
it, which the system frees if the writer dies: such a file is removed by the next writer. Weights are not code, but
they decide what a model says, so the folder and its files must belong to this user or root, like compiled kernels.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pagewire.ipc.environment import env_float
from pagewire.kernels.native.cache import cache_root, check_owner, opened_folder

logger = logging.getLogger("pagewire.worker")

GIB = 1 << 30
DEFAULT_GIB = 32.0
SUFFIX, UNFINISHED = ".weights", ".part"


def weight_folder() -> Path:
    """`weights` in the root of the cache."""
    return cache_root() / "weights"


def open_file(key: str) -> int | None:
    """A descriptor of the file of a key, which becomes the most recently used; None if there is none to rely on.

    A file that others could have written is removed.
    """
    try:
        with opened_folder(weight_folder()) as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(key + SUFFIX, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        _refuse(key, error)
        return None
    try:
        check_owner(os.fstat(descriptor), stat.S_IFREG, weight_folder())
    except OSError as error:
        os.close(descriptor)
        _refuse(key, error)
        return None
    with suppress(OSError):  # a file of root's, or a file system that is mounted read-only
        os.utime(descriptor)
    return descriptor


def size_of(key: str) -> int | None:
    """Bytes of the file of a key; None if there is none."""
    try:
        with opened_folder(weight_folder()) as folder:
            return os.stat(key + SUFFIX, dir_fd=folder, follow_symlinks=False).st_size
    except OSError:
        return None


def _refuse(key: str, error: OSError) -> None:
    logger.warning("ignored packed weights: %s", error)
    remove(key)


def remove(key: str) -> None:
    """Remove the file of a key, where that is possible."""
    with suppress(OSError), opened_folder(weight_folder()) as folder:
        os.unlink(key + SUFFIX, dir_fd=folder)


@contextmanager
def new_file(key: str, size: int) -> Iterator[BinaryIO | None]:
    """A file to write, which replaces the one of a key when the block ends without an exception.

    None if another process is writing it, or if it would be larger than the cache may be. size: about how large it
    will be, in bytes; for that the least recently used files are removed.

    Raises:
        OSError: it cannot be written; nothing is left of it. ValueError: PAGEWIRE_WEIGHT_CACHE_SPACE is no number.
    """
    weight_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    with opened_folder(weight_folder()) as folder:
        unfinished = key + UNFINISHED
        file = _locked_file(folder, unfinished)
        if file is None:
            yield None
            return
        with file:
            try:
                if not make_room(folder, size):
                    os.unlink(unfinished, dir_fd=folder)
                    yield None
                    return
                yield file
                file.flush()
                os.rename(unfinished, key + SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise


def _locked_file(folder: int, name: str) -> BinaryIO | None:
    """An empty file of this name, locked; None if another process has locked it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = open(os.open(name, flags, 0o600, dir_fd=folder), "wb")  # noqa: PTH123, SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last writer may have renamed it just before the lock was free.
        named = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if os.path.samestat(named, os.fstat(file.fileno())):
            file.truncate(0)
            return file
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
            file.close()
            raise
    file.close()
    return None


def limit(folder: int, held: int) -> int:
    """Bytes that the files may take: `PAGEWIRE_WEIGHT_CACHE_SPACE`, but half of what the disk can give at most.

    held: bytes that they take now.

    Raises:
        ValueError: the variable is not a number.
    """
    disk = os.fstatvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    return int(min(env_float("PAGEWIRE_WEIGHT_CACHE_SPACE", DEFAULT_GIB) * GIB, (free + held) / 2))


def make_room(folder: int, size: int) -> bool:
    """Remove the files that were not used for longest, until one of `size` bytes fits. False if it never would."""
    _remove_abandoned(folder)
    files = []
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            if name.endswith(SUFFIX):
                info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                files.append((info.st_mtime_ns, info.st_size, name))
    held = sum(length for _, length, _ in files)
    most = limit(folder, held)
    if size > most:
        return False
    for _, length, name in sorted(files):
        if held + size <= most:
            break
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
            held -= length
    return True


def _remove_abandoned(folder: int) -> None:
    """Remove the unfinished files of writers that have died."""
    for name in os.listdir(folder):
        if not name.endswith(UNFINISHED):
            continue
        with suppress(OSError):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
            finally:
                os.close(descriptor)
