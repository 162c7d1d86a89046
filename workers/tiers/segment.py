"""Segments: files to which entries are appended, each with an index that can be made again from it.

    NAME.kv      [header][content] [header][content] ...
    NAME.index   [header] [header] ...

A segment has one writer, which holds a lock on it for as long as it lives; later it is only read. A writer that is
killed leaves an entry that ends too early, and maybe an index that lacks the last ones. So what the index says is
believed as far as its headers are whole and follow each other within the file; behind, the headers are looked up in
the segment itself.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pagewire.ipc.wire.codec import Buffer
from pagewire.workers.tiers.entry import HEADER_BYTES, EntryHeader, digest_of

SEGMENT, INDEX = ".kv", ".index"
MAX_PIECES = 1000  # of one call of writev
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """Where an entry lies: the segment's name without ending, and the offset of its header."""

    segment: str
    offset: int
    header: EntryHeader


class SegmentWriter:
    """A new segment in a folder, with a lock on it.

    folder: descriptor of the folder. name: without ending.

    Attributes:
        size: bytes of the whole entries. num_bytes: of these, and of the index.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: int, name: str) -> None:
        self.name, self.size, self.num_bytes = name, 0, 0
        self._file = os.open(name + SEGMENT, _NEW, 0o600, dir_fd=folder)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._index = os.open(name + INDEX, _NEW, 0o600, dir_fd=folder)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, header: EntryHeader, pieces: Sequence[Buffer]) -> EntryPlace:
        """Append an entry whose content is `pieces`.

        Raises:
            OSError: it could not be written; nothing counts as appended.
        """
        try:
            encoded = header.encode()
            write_all(self._file, [encoded, *pieces])
            write_all(self._index, [encoded])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self.size)
                os.lseek(self._file, self.size, os.SEEK_SET)
            raise
        place = EntryPlace(self.name, self.size, header)
        self.size += header.entry_bytes
        self.num_bytes += header.entry_bytes + HEADER_BYTES
        return place

    def close(self) -> None:
        """End the segment, and give its lock back."""
        os.close(self._file)
        os.close(self._index)


def write_all(file: int, pieces: Sequence[Buffer]) -> None:
    """Write pieces one behind the other.

    Raises:
        OSError: they are not all written.
    """
    left = [memoryview(piece).cast("B") for piece in pieces]
    while left:
        count = os.writev(file, left[:MAX_PIECES])
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]


def read_header(file: int, offset: int) -> EntryHeader | None:
    """The header at an offset of a file; None if there is none."""
    return EntryHeader.decode(os.pread(file, HEADER_BYTES, offset))


def open_to_read(folder: int, name: str) -> int:
    """A descriptor of a regular file of this user in a folder.

    Raises:
        OSError: there is none.
    """
    file = os.open(name, _READ, dir_fd=folder)
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(file)
        raise PermissionError(f"{name} is no regular file of this user")
    return file


def scan(folder: int, name: str, start: int = 0) -> Iterator[EntryPlace]:
    """The entries of a segment, in order, as far as their headers can be read. start: offset of the first.

    Raises:
        OSError: the segment cannot be opened.
    """
    file = open_to_read(folder, name + SEGMENT)
    try:
        size, offset = os.fstat(file).st_size, start
        for header in _indexed(folder, name) if not start else ():
            if offset + header.entry_bytes > size:
                break
            yield EntryPlace(name, offset, header)
            offset += header.entry_bytes
        while (found := read_header(file, offset)) is not None and offset + found.entry_bytes <= size:
            yield EntryPlace(name, offset, found)
            offset += found.entry_bytes
    finally:
        os.close(file)


def _indexed(folder: int, name: str) -> Iterator[EntryHeader]:
    """The headers in a segment's index, up to the first that is damaged; none without an index."""
    try:
        file = open_to_read(folder, name + INDEX)
    except OSError:
        return
    with open(file, "rb") as index:  # noqa: PTH123 - a descriptor
        while (header := EntryHeader.decode(index.read(HEADER_BYTES))) is not None:
            yield header


def read_entry(folder: int, place: EntryPlace) -> memoryview | str:
    """The content of an entry, whose every byte is as it was written; else why there is none, as text."""
    wanted = place.header
    try:
        file = open_to_read(folder, place.segment + SEGMENT)
        try:
            data = bytearray(wanted.entry_bytes)
            count = read_into(file, memoryview(data), place.offset)
        finally:
            os.close(file)
    except OSError as error:
        return str(error)
    content = memoryview(data)[HEADER_BYTES:]
    if count < len(data):
        return "it ends too early"
    if EntryHeader.decode(bytes(data[:HEADER_BYTES])) != wanted:
        return "its header is damaged"
    if digest_of([content]) != wanted.digest:
        return "its content is damaged"
    return content


def read_into(file: int, data: memoryview, offset: int) -> int:
    """Fill `data` from an offset on; returns how many bytes there were."""
    count = 0
    while count < len(data) and (more := os.preadv(file, [data[count:]], offset + count)):
        count += more
    return count


def is_being_written(folder: int, name: str) -> bool:
    """True if a segment has a writer that lives."""
    try:
        file = open_to_read(folder, name + SEGMENT)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def remove(folder: int, name: str) -> None:
    """Remove a segment and its index."""
    for ending in (SEGMENT, INDEX):
        with suppress(OSError):
            os.unlink(name + ending, dir_fd=folder)
