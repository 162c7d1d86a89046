"""Runs batches: each line of a file is a request to this server's own endpoints, for the tenant of the batch.

    validating --> in_progress --> finalizing --> completed
         \\-> failed      \\-> cancelling --> cancelled, or expired

One batch of a tenant runs at a time; others wait in order. Results are written as they come, so a crash loses none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import IO

from starlette.types import ASGIApp

from pagewire.frontend.server.batches import in_process
from pagewire.frontend.server.batches.folder import BatchFolder
from pagewire.frontend.server.batches.lines import (
    Failure,
    InvalidLineError,
    Result,
    custom_id_of,
    parse_line,
    run_lines,
    write_to,
)
from pagewire.frontend.server.batches.protocol import BatchObject, BatchProblem, BatchProblems, BatchStatus
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.tenants import ApiTenant

logger = logging.getLogger("pagewire.server")

CONCURRENCY = 32  # requests of a batch at once
MAX_LINES = 50_000
MAX_LINE_ERRORS = 100  # that are named


class BatchRunner:
    """Runs the batches of a folder."""

    def __init__(self, folder: BatchFolder) -> None:
        self._folder = folder
        self._turns: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, app: ASGIApp, tenant: ApiTenant, batch: BatchObject) -> None:
        """Begin a batch once those of its tenant that came before have ended. app: the server's application."""
        task = asyncio.create_task(self._run(app, tenant, batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, owner: str, batch: BatchObject) -> None:
        """Send no more requests of a batch; those that are open end."""
        if batch.status in ("validating", "in_progress"):
            self._set(owner, batch, "cancelling")

    async def _run(self, app: ASGIApp, tenant: ApiTenant, batch: BatchObject) -> None:
        owner = tenant.name
        async with self._turns.setdefault(owner, asyncio.Lock()):
            try:
                if errors := await asyncio.to_thread(self._errors_in, batch):
                    batch.errors = BatchProblems(errors)
                    self._set(owner, batch, "failed")
                elif batch.status == "cancelling":
                    self._set(owner, batch, "cancelled")
                else:
                    await self._answer(app, tenant, batch)
            except Exception as error:
                logger.exception("batch %s failed", batch.id)
                batch.errors = BatchProblems([BatchProblem("server_error", str(error))])
                self._folder.keep_results(owner, batch)
                self._set(owner, batch, "failed")

    async def _answer(self, app: ASGIApp, tenant: ApiTenant, batch: BatchObject) -> None:
        owner = tenant.name
        output, errors = self._folder.open_results(batch)
        self._set(owner, batch, "in_progress")
        with output, errors, self._folder.path(batch.input_file_id).open("rb") as lines:
            post = in_process.open_poster(app, tenant=tenant)
            writer = ResultWriter(self._folder, owner, batch, output, errors)
            await run_lines(self._pending(lines, batch), post, writer.write, CONCURRENCY)
            if batch.status == "in_progress" and time.time() >= batch.expires_at:
                writer.write_expired(lines)
        ended: BatchStatus = "completed"
        if batch.status == "cancelling":
            ended = "cancelled"
        elif batch.request_counts.completed + batch.request_counts.failed < batch.request_counts.total:
            ended = "expired"
        else:
            self._set(owner, batch, "finalizing")
        self._folder.keep_results(owner, batch)
        self._set(owner, batch, ended)

    @staticmethod
    def _pending(lines: Iterator[bytes], batch: BatchObject) -> Iterator[bytes]:
        """The lines, until the batch is cancelled or its time is over."""
        while batch.status == "in_progress" and time.time() < batch.expires_at:
            if (line := next(lines, None)) is None:
                return
            yield line

    def _errors_in(self, batch: BatchObject) -> list[BatchProblem]:
        """The errors in a batch's input, before anything of it is answered; its requests are counted."""
        errors: list[BatchProblem] = []
        seen: dict[str, int] = {}
        with self._folder.path(batch.input_file_id).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    request = parse_line(number, line, seen)
                    if request.url != batch.endpoint:
                        raise InvalidLineError(
                            "mismatched_endpoint", f"url is not the batch's, {batch.endpoint}"
                        )
                except InvalidLineError as error:
                    errors.append(BatchProblem(error.code, str(error), number))
                if len(seen) > MAX_LINES or len(errors) >= MAX_LINE_ERRORS:
                    break
        if len(seen) > MAX_LINES:
            errors.append(BatchProblem("too_many_requests", f"a batch has at most {MAX_LINES} requests"))
        if not seen and not errors:
            errors.append(BatchProblem("empty_file", "the file has no requests"))
        batch.request_counts.total = len(seen)
        return errors

    def _set(self, owner: str, batch: BatchObject, status: BatchStatus) -> None:
        batch.status = status
        if status != "validating":
            setattr(batch, f"{status}_at", int(time.time()))
        self._folder.put_batch(owner, batch)


class ResultWriter:
    """Writes the results of a batch, failures apart, and counts them."""

    def __init__(
        self, folder: BatchFolder, owner: str, batch: BatchObject, output: IO[bytes], errors: IO[bytes]
    ) -> None:
        self._folder, self._owner, self._batch = folder, owner, batch
        self._files = output, errors
        self._output = write_to(output, "the batch's output file")
        self._errors = write_to(errors, "the batch's error file")

    def write(self, result: Result) -> None:
        """Write a result.

        Raises:
            APIError: the tenant has no room left. OSError: the disk has none.
        """
        self._folder.check_room(self._owner, sum(file.tell() for file in self._files))
        if result.good:
            self._output(result)
            self._batch.request_counts.completed += 1
        else:
            self._errors(result)
            self._batch.request_counts.failed += 1

    def write_expired(self, lines: Iterator[bytes]) -> None:
        """Name the requests that were not sent before the time was over."""
        for line in lines:
            if line.strip():
                failure = Failure("batch_expired", "the batch ended before this request was sent")
                self._errors(Result(f"batch_req_{self._batch.id}", custom_id_of(line), error=failure))


def check_input_file(folder: BatchFolder, owner: str, name: str) -> None:
    """Check that a batch can read a file.

    Raises:
        APIError: there is no such file of the owner, or it is a batch's output.
    """
    if folder.file(owner, name).purpose != "batch":
        raise APIError(400, "input_file_id is the output of a batch", param="input_file_id")
