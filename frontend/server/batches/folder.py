"""The folder of a server's files and batches: what is there after a restart.

    ID.data          the bytes of a file
    ID.json          a file or a batch, with its owner; written last, and replaced whole

Everything belongs to a tenant; for others it does not exist.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import IO

import msgspec

from pagewire.frontend.server.batches.protocol import (
    BatchObject,
    BatchProblem,
    BatchProblems,
    FileObject,
)
from pagewire.frontend.server.http.errors import APIError
from pagewire.ipc.host.owned import weakness
from pagewire.ipc.quoting import quoted

ENTRY_BYTES = 1024  # counted for each file and batch, beside its bytes
DATA, ENTRY, UNFINISHED = ".data", ".json", ".part"
NAME_CHARS = 256  # of a file's name that are kept
INTERRUPTED = "the server stopped while the batch ran; what was answered until then is in its files"


class Owned(msgspec.Struct):
    """The kind of an object that a tenant has in the folder."""

    owner: str
    file: FileObject | None = None
    batch: BatchObject | None = None


class BatchFolder:
    """The files and batches of a folder, which one server has for itself. Not thread-safe.

    max_bytes: of the files of one tenant.

    Raises:
        ValueError: the folder cannot be used, or another server uses it.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._entries: dict[str, Owned] = {}  # by id, the oldest first
        self._sizes: Counter[str] = Counter()  # by owner
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (reason := weakness(root.stat())) is not None:
                raise ValueError(
                    f"batch_dir: {root} is open to other users ({reason}): give one of mode 0700"
                )
            self._lock = (root / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            raise ValueError(f"batch_dir: another server uses {root}") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise ValueError(f"batch_dir: {root} cannot be used: {error}") from error

    def _read(self) -> None:
        for path in self._root.glob(f"*{UNFINISHED}"):
            path.unlink()
        entries = [
            msgspec.json.decode(path.read_bytes(), type=Owned) for path in self._root.glob(f"*{ENTRY}")
        ]
        for entry in sorted(entries, key=_created):
            self._entries[_id(entry)] = entry
            self._sizes[entry.owner] += _size(entry)
        for entry in entries:
            if entry.batch is not None and entry.batch.running:
                self._end_interrupted(entry.owner, entry.batch)

    def _end_interrupted(self, owner: str, batch: BatchObject) -> None:
        self.keep_results(owner, batch)
        batch.status, batch.failed_at = "failed", int(time.time())
        batch.errors = BatchProblems([BatchProblem("server_restarted", INTERRUPTED)])
        self.put_batch(owner, batch)

    # -------------------------------------------------------------- files

    def file(self, owner: str, name: str) -> FileObject:
        """The owner's file with an id.

        Raises:
            APIError: there is none.
        """
        entry = self._entries.get(name)
        if entry is None or entry.owner != owner or entry.file is None:
            raise APIError(404, f"there is no file {quoted(name)}", code="not_found")
        return entry.file

    def files(self, owner: str) -> list[FileObject]:
        """The owner's files, the newest first."""
        return [
            entry.file
            for entry in reversed(self._entries.values())
            if entry.owner == owner and entry.file is not None
        ]

    def path(self, name: str) -> Path:
        """Where the bytes of a file are. name: an id that was made here."""
        return self._root / (name + DATA)

    async def add_file(self, owner: str, filename: str, data: bytes) -> FileObject:
        """Keep a file of an owner.

        Raises:
            APIError: the owner has no room for it. OSError: the disk has none.
        """
        self.check_room(owner, len(data))
        file = FileObject(
            id=f"file-{uuid.uuid4().hex}",
            num_bytes=len(data),
            created_at=int(time.time()),
            filename=filename[:NAME_CHARS],
            purpose="batch",
        )
        await asyncio.to_thread(self._write, self.path(file.id), data)
        try:
            self.check_room(owner, len(data))  # others may have come meanwhile
            self._put(Owned(owner, file=file))
        except (APIError, OSError):
            self.path(file.id).unlink(missing_ok=True)
            raise
        return file

    def delete_file(self, owner: str, name: str) -> None:
        """Forget a file.

        Raises:
            APIError: there is none, or a batch still needs it.
        """
        self.file(owner, name)
        for batch in self.batches(owner):
            if batch.running and batch.input_file_id == name:
                raise APIError(409, f"the batch {batch.id} reads this file: cancel it before", code="in_use")
        self._drop(name)

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Refuse what an owner has no room for.

        Raises:
            APIError: the files would have more bytes than are allowed.
        """
        if self._sizes[owner] + num_bytes + ENTRY_BYTES > self._max_bytes:
            message = (
                f"your files have {self._sizes[owner]} bytes, and at most {self._max_bytes} are kept "
                "(--batch-dir-bytes): delete some"
            )
            raise APIError(413, message, code="storage_full")

    # -------------------------------------------------------------- batches

    def batch(self, owner: str, name: str) -> BatchObject:
        """The owner's batch with an id.

        Raises:
            APIError: there is none.
        """
        entry = self._entries.get(name)
        if entry is None or entry.owner != owner or entry.batch is None:
            raise APIError(404, f"there is no batch {quoted(name)}", code="not_found")
        return entry.batch

    def batches(self, owner: str) -> list[BatchObject]:
        """The owner's batches, the newest first."""
        return [
            entry.batch
            for entry in reversed(self._entries.values())
            if entry.owner == owner and entry.batch is not None
        ]

    def put_batch(self, owner: str, batch: BatchObject) -> None:
        """Keep the state of a batch.

        Raises:
            OSError: the disk has no room.
        """
        self._put(Owned(owner, batch=batch))

    def open_results(self, batch: BatchObject) -> tuple[IO[bytes], IO[bytes]]:
        """Begin the files of a batch's results and of its failures, which get their ids."""
        batch.output_file_id, batch.error_file_id = (f"file-{uuid.uuid4().hex}" for _ in range(2))
        return open_private(self.path(batch.output_file_id)), open_private(self.path(batch.error_file_id))

    def keep_results(self, owner: str, batch: BatchObject) -> None:
        """Make what was written of a batch's results to files of its owner; an empty one is dropped."""
        batch.output_file_id = self._keep_result(owner, batch.output_file_id, f"{batch.id}_output.jsonl")
        batch.error_file_id = self._keep_result(owner, batch.error_file_id, f"{batch.id}_error.jsonl")

    def _keep_result(self, owner: str, name: str | None, filename: str) -> str | None:
        if name is None or name in self._entries:
            return name
        path = self.path(name)
        num_bytes = path.stat().st_size if path.exists() else 0
        if not num_bytes:
            path.unlink(missing_ok=True)
            return None
        now = int(time.time())
        file = FileObject(
            id=name, num_bytes=num_bytes, created_at=now, filename=filename, purpose="batch_output"
        )
        self._put(Owned(owner, file=file))
        return name

    # -------------------------------------------------------------- on the disk

    def _put(self, entry: Owned) -> None:
        name = _id(entry)
        self._write(self._root / (name + ENTRY), msgspec.json.encode(entry))
        if name not in self._entries:
            self._sizes[entry.owner] += _size(entry)
        self._entries[name] = entry

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name)
        self._sizes[entry.owner] -= _size(entry)
        (self._root / (name + ENTRY)).unlink(missing_ok=True)
        self.path(name).unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        part = path.with_name(path.name + UNFINISHED)
        try:
            with open_private(part, -1) as file:
                file.write(data)
            os.replace(part, path)  # noqa: PTH105
        except OSError:
            part.unlink(missing_ok=True)
            raise


def open_private(path: Path, buffering: int = 0) -> IO[bytes]:
    """A new file that only this user may read. buffering: 0: without a buffer, -1: with one."""
    return open(path, "wb", buffering, opener=lambda name, flags: os.open(name, flags, 0o600))


def _id(entry: Owned) -> str:
    kept = entry.file or entry.batch
    assert kept is not None
    return kept.id


def _created(entry: Owned) -> int:
    kept = entry.file or entry.batch
    assert kept is not None
    return kept.created_at


def _size(entry: Owned) -> int:
    return ENTRY_BYTES + (0 if entry.file is None else entry.file.num_bytes)
