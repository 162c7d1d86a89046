"""Requests and answers of OpenAI's APIs for files and batches."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import field

from pagewire.frontend.server.batches.lines import URLS
from pagewire.frontend.server.http.form import FormFile
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.params import Name

BatchStatus: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
RUNNING: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")


class FileUpload(msgspec.Struct, kw_only=True):
    """A form with a file. purpose: "batch", as files are the input of batches here."""

    file: FormFile
    purpose: str


REFUSED = {
    "expires_after[anchor]": "files stay until they are deleted",
    "expires_after[seconds]": "files stay until they are deleted",
}


class FileObject(msgspec.Struct, kw_only=True):
    """A file. num_bytes: its size. created_at: in seconds since the epoch."""

    id: str
    num_bytes: int = field(name="bytes")
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    expires_at: None = None


class DeletedFile(msgspec.Struct):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchRequest(msgspec.Struct, kw_only=True):
    """A batch: the file with its requests, and the endpoint that all of them are for.

    metadata: up to 16 strings, which come back with the batch.
    """

    input_file_id: Name
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[Name, str] | None = None
    output_expires_after: Any = None

    def check(self) -> None:
        """Check its values. Raises FieldValueError: one is not possible."""
        if self.endpoint not in URLS:
            raise FieldValueError(
                "endpoint", f"must be one of {', '.join(URLS)}, got {quoted(self.endpoint)}"
            )
        if self.output_expires_after is not None:
            raise FieldValueError(
                "output_expires_after", "is not supported: files stay until they are deleted"
            )
        if len(self.metadata or ()) > 16 or any(len(value) > 512 for value in (self.metadata or {}).values()):
            raise FieldValueError("metadata", "has at most 16 values of at most 512 characters")


class BatchProblem(msgspec.Struct):
    """Why a batch failed. line: of its input, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchProblems(msgspec.Struct):
    """The errors of a batch."""

    data: list[BatchProblem]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """How many requests of a batch there are, and how they ended so far."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are in seconds since the epoch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: Literal["batch"] = "batch"
    status: BatchStatus = "validating"
    errors: BatchProblems | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def running(self) -> bool:
        """True until the batch has ended."""
        return self.status in RUNNING


class FileList(msgspec.Struct, kw_only=True):
    """A page of files, the newest first."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class BatchList(msgspec.Struct, kw_only=True):
    """A page of batches, the newest first."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
