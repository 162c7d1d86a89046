"""A folder of blocks on disk: a map from a block's name to its bytes, of a bounded size.

    FOLDER/lock
    FOLDER/IDENTITY/NAME.kv, NAME.index      segments, each of one writer

Blocks of another model or layout have another identity: they lie in another folder, and their headers say so. Any
number of processes may use a folder. Each writes segments of its own and reads all; a lock keeps two from making
room at the same time. Room is made by removing the segments that were used least recently, of any identity, but
none that is being written.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pagewire.ipc.wire.codec import Buffer
from pagewire.kernels.native.cache import opened_folder
from pagewire.workers.tiers.counts import TierCounts
from pagewire.workers.tiers.entry import HEADER_BYTES, EntryHeader, digest_of
from pagewire.workers.tiers.segment import (
    INDEX,
    SEGMENT,
    EntryPlace,
    SegmentWriter,
    is_being_written,
    read_entry,
    remove,
    scan,
)

logger = logging.getLogger("pagewire.worker")

SEGMENT_BYTES = 256 << 20  # of the largest segment
SEGMENTS = 8  # that fit into the quota at least: what is removed at a time is an eighth of it at most
USED_SECONDS = 1.0  # between two times that a segment is marked as used
LOCK = "lock"
IDENTITY = re.compile("[0-9a-f]{64}")  # the name of its folder


class TierFolder:
    """The blocks of one identity in a folder. For one thread.

    path: of the folder, which is made if there is none. identity: 32 bytes.
    quota: bytes that all identities may take.
    block_bytes, state_bytes: of a block, and of the states behind one; 0: the model keeps none.
    num_writers: processes of one engine that write into the folder, each blocks of its own.

    Attributes:
        places: where the blocks are, by name. counts: since it was opened.
        segment_bytes: of a segment that is full. num_bytes: of the blocks of this identity.

    Raises:
        OSError: the folder cannot be used, as others may write to it. ValueError: the quota holds no blocks.
    """

    def __init__(
        self,
        path: Path,
        identity: bytes,
        quota: int,
        block_bytes: int,
        num_writers: int = 1,
        state_bytes: int = 0,
    ) -> None:
        entry = max(block_bytes, state_bytes) + 2 * HEADER_BYTES
        if quota < 2 * entry * num_writers:
            each = f" for each of {num_writers} workers" if num_writers > 1 else ""
            raise ValueError(f"{quota:,} bytes do not hold two blocks of {entry:,} bytes{each}")
        self.places: dict[bytes, EntryPlace] = {}
        self.counts = TierCounts()
        self.num_bytes = 0
        self._identity, self._quota, self._entry_bytes = identity, quota, entry
        self._sizes = {block_bytes, state_bytes} - {0}
        self.segment_bytes = max(entry, min(SEGMENT_BYTES, quota // max(SEGMENTS, 2 * num_writers)))
        self._changes: dict[bytes, bool] = {}  # names that came (True) or went since `take_changes`
        self._ends: dict[str, int] = {}  # of segments: where the next entry would be
        self._used: dict[str, float] = {}
        self._writer: SegmentWriter | None = None
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with opened_folder(path) as root:
            self._root = os.dup(root)
            self._own = opened_below(self._root, identity.hex())
        self.refresh()

    def __len__(self) -> int:
        return len(self.places)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The names that have come, and those that have gone, since the last call."""
        changes, self._changes = self._changes, {}
        came = [name for name, is_there in changes.items() if is_there]
        return came, [name for name, is_there in changes.items() if not is_there]

    # ------------------------------------------------------------ blocks

    def parent_of(self, name: bytes) -> bytes | None:
        """The name of the block before one; None if it is not there."""
        place = self.places.get(name)
        return None if place is None else place.header.parent

    def read(self, name: bytes) -> memoryview | None:
        """The bytes of a block; None if it is not there, or damaged, which a log line says."""
        place = self.places.get(name)
        if place is None:
            return None
        content = read_entry(self._own, place)
        if isinstance(content, str):
            self.counts.unreadable += 1
            self._forget(name)
            logger.warning("KV block %s cannot be read: %s", name.hex()[:16], content)
            return None
        self.counts.read += 1
        self.counts.bytes_read += len(content)
        self._mark_used(place.segment)
        return content

    def write(self, name: bytes, parent: bytes, pieces: Sequence[Buffer]) -> bool:
        """Append a block whose content is `pieces`, unless it is there. False: there is no room for it.

        Raises:
            OSError: it cannot be written.
        """
        if name in self.places:
            return True
        writer = self._writer_with_room()
        if writer is None:
            self.counts.dropped += 1
            return False
        size = sum(map(len, pieces))
        assert size in self._sizes, f"a block of {size} bytes"
        header = EntryHeader(self._identity, name, parent, size, digest_of(pieces))
        try:
            self._add(writer.append(header, pieces))
        except OSError:
            self._end_segment()
            raise
        self.counts.written += 1
        self.counts.bytes_written += size
        return True

    def _add(self, place: EntryPlace) -> None:
        name = place.header.name
        if name in self.places:
            self.num_bytes -= self.places[name].header.entry_bytes + HEADER_BYTES
        self.num_bytes += place.header.entry_bytes + HEADER_BYTES
        self.places[name] = place
        self._changes[name] = True
        self._ends[place.segment] = place.offset + place.header.entry_bytes

    def _forget(self, name: bytes) -> None:
        self.num_bytes -= self.places.pop(name).header.entry_bytes + HEADER_BYTES
        self._changes[name] = False

    def _mark_used(self, segment: str) -> None:
        now = time.monotonic()
        if now - self._used.get(segment, 0.0) >= USED_SECONDS:
            self._used[segment] = now
            with suppress(OSError):
                os.utime(segment + SEGMENT, dir_fd=self._own, follow_symlinks=False)

    # ------------------------------------------------------------ segments

    def refresh(self) -> None:
        """Learn what other processes have written and removed."""
        there = set(segments_in(self._own))
        gone = self._ends.keys() - there
        if gone:
            for name in [name for name, place in self.places.items() if place.segment in gone]:
                self._forget(name)
            for segment in gone:
                del self._ends[segment]
        for segment in sorted(
            there
        ):  # a name begins with its time: the last of two entries of a block counts
            if self._writer is not None and segment == self._writer.name:
                continue
            with suppress(OSError):  # it was removed meanwhile
                for place in scan(self._own, segment, self._ends.setdefault(segment, 0)):
                    if place.header.identity != self._identity or place.header.size not in self._sizes:
                        break
                    self._add(place)

    def _writer_with_room(self) -> SegmentWriter | None:
        """The segment that is being written, or a new one; None if there is no room for one."""
        writer = self._writer
        if writer is not None and writer.num_bytes + self._entry_bytes <= self.segment_bytes:
            return writer
        self._end_segment()
        with self._locked():
            if self._make_room():
                name = f"{time.time_ns():020d}-{os.getpid()}-{os.urandom(4).hex()}"
                self._writer = SegmentWriter(self._own, name)
                self._ends[name] = 0
        return self._writer

    def _end_segment(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """A context in which no other process makes room."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(LOCK, flags, 0o600, dir_fd=self._root)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _make_room(self) -> bool:
        """Remove segments until a full one fits. False: those that are being written leave no room."""
        segments, total = [], 0
        for folder in subfolders(self._root):
            try:
                opened = opened_below(self._root, folder)
            except OSError:
                continue
            try:
                for name in segments_in(opened):
                    used, size = size_in(opened, name)
                    if is_being_written(opened, name):
                        size = max(size, self.segment_bytes)  # it may still grow
                    else:
                        segments.append((used, folder, name, size))
                    total += size
            finally:
                os.close(opened)
        for _, folder, name, size in sorted(segments):
            if total + self.segment_bytes <= self._quota:
                break
            with suppress(OSError):
                opened = opened_below(self._root, folder)
                remove(opened, name)
                os.close(opened)
            total -= size
        self.refresh()
        return total + self.segment_bytes <= self._quota

    def clear(self) -> None:
        """Remove all blocks of this identity, but not what another process is writing."""
        self._end_segment()
        for segment in segments_in(self._own):
            if not is_being_written(self._own, segment):
                remove(self._own, segment)
        for name in list(self.places):
            self._forget(name)

    def close(self) -> None:
        """End the segment that is being written, and close the folder."""
        self._end_segment()
        os.close(self._own)
        os.close(self._root)


def opened_below(root: int, name: str) -> int:
    """A descriptor of a folder of this user in another one, which is made if there is none.

    Raises:
        OSError: it is a link, or no folder of this user.
    """
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=root)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    if os.fstat(folder).st_uid != os.geteuid():
        os.close(folder)
        raise PermissionError(f"{name} belongs to another user")
    return folder


def subfolders(root: int) -> list[str]:
    """The names of the folders of identities; what else lies there is not touched."""
    with os.scandir(root) as entries:
        return [
            entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False) and IDENTITY.fullmatch(entry.name)
        ]


def segments_in(folder: int) -> list[str]:
    """The names of the segments in a folder, without ending."""
    return [name.removesuffix(SEGMENT) for name in os.listdir(folder) if name.endswith(SEGMENT)]


def size_in(folder: int, segment: str) -> tuple[int, int]:
    """When a segment was used last, and its bytes with those of its index; 0 for what is not there."""
    used = size = 0
    for ending in (SEGMENT, INDEX):
        with suppress(OSError):
            info = os.stat(segment + ending, dir_fd=folder, follow_symlinks=False)
            used, size = max(used, info.st_mtime_ns), size + info.st_size
    return used, size
