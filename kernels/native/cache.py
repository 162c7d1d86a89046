"""The files of compiled kernels, and the rules for every folder of the cache.

Kernels are code that this process runs. So a file counts only if it belongs to this user or root and nobody else
may write to it or to its folder, and if its content is what was stored: the content is followed by its SHA-256. Any
other file is a miss; the kernel is compiled anew, and the file replaced.
"""

import fcntl
import functools
import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("pagewire.kernels")

DIGEST_BYTES = hashlib.sha256().digest_size
FORMAT = "content and SHA-256"
"""Part of the name of every file, with what it was made of: other versions have other names."""


def cache_root() -> Path:
    """`$PAGEWIRE_CACHE_ROOT`, by default `$XDG_CACHE_HOME/pagewire` or `~/.cache/pagewire`."""
    if root := os.environ.get("PAGEWIRE_CACHE_ROOT"):
        return Path(root)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagewire"


def cache_folder() -> Path:
    """`kernels` in `cache_root`."""
    return cache_root() / "kernels"


def read(name: str) -> bytes | None:
    """The content of a file of the cache; None if there is none, or none that can be relied on."""
    try:
        with opened_folder() as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(name, flags, dir_fd=folder), "rb") as file:  # noqa: PTH123 - a descriptor
                check_owner(os.fstat(file.fileno()), stat.S_IFREG)
                stored = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        warn(f"ignored compiled kernels: {error}")
        return None
    content, digest = stored[:-DIGEST_BYTES], stored[-DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        warn(f"ignored {name} in {cache_folder()}: it is damaged")
        return None
    return content


def write(name: str, content: bytes) -> None:
    """Store a file, which is complete before it gets its name. Where that fails, a log line says why."""
    try:
        cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with opened_folder() as folder:
            unnamed = f"{name}.{os.urandom(8).hex()}"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with open(os.open(unnamed, flags, 0o600, dir_fd=folder), "wb") as file:  # noqa: PTH123
                    file.write(content + hashlib.sha256(content).digest())
                os.rename(unnamed, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(unnamed, dir_fd=folder)
                raise
    except OSError as error:
        warn(f"compiled kernels are not kept: {error}; set PAGEWIRE_CACHE_ROOT to another folder")


@functools.cache
def warn(text: str) -> None:
    """Log a warning, once: there are hundreds of kernels."""
    logger.warning("%s", text)


@contextmanager
def opened_folder(folder: Path | None = None) -> Iterator[int]:
    """A descriptor of a folder to which only this user and root may write. folder: default `cache_folder`.

    Raises:
        PermissionError: others may. OSError: it cannot be opened.
    """
    folder = folder or cache_folder()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_owner(os.fstat(descriptor), stat.S_IFDIR, folder)
        yield descriptor
    finally:
        os.close(descriptor)


def check_owner(info: os.stat_result, kind: int, folder: Path | None = None) -> None:
    """Check that only this user (or root) can change a folder, or a file in it. kind: `S_IFDIR` or `S_IFREG`.

    Raises:
        PermissionError: others can, or it is of another kind.
    """
    if stat.S_IFMT(info.st_mode) != kind:
        raise PermissionError("it is not a regular file")
    if info.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{folder or cache_folder()} or a file in it belongs to user {info.st_uid}")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to {folder or cache_folder()} or a file in it")


@contextmanager
def locked() -> Iterator[None]:
    """A context in which no other process or thread has the lock of the cache; its folder is the lock file.

    Where the file system has no locks, or other users could hold the lock for ever since they can open the folder,
    there is none, and processes may compile the same kernels side by side.
    """
    try:
        cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(cache_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # `write` says why
        yield
        return
    try:
        if not os.fstat(descriptor).st_mode & 0o077:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
