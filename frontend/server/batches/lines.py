"""OpenAI batch files: one request per input line, one result per output line, in order of completion.

lines --> [concurrency] x (check, post) --> write
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from pagewire.ipc.quoting import quoted

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
BUSY = 429
RETRY_SECONDS = (
    1.0  # pause before a request is sent again after status 429: the core is shared, and nothing is urgent
)


class BatchLine(msgspec.Struct):
    """A line of the input file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class StreamField(msgspec.Struct):
    """The field of a request's body that is checked here."""

    stream: bool | None = None


class CustomId(msgspec.Struct):
    """The id of a line that is otherwise invalid."""

    custom_id: str | None = None


class BatchResponse(msgspec.Struct):
    """The HTTP response of the endpoint."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct):
    """Why a line was not sent to an endpoint."""

    code: str
    message: str


class Result(msgspec.Struct):
    """A line of the output file: `response`, whatever its status, or `error` if the line was not sent."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: Failure | None = None

    @property
    def good(self) -> bool:
        """True if the request succeeded."""
        return self.response is not None and self.response.status_code == 200


@dataclass
class Counts:
    """Number of lines that succeeded, failed, and were skipped because an earlier run answered them."""

    good: int = 0
    failed: int = 0
    skipped: int = 0


Post = Callable[[str, bytes], Awaitable[BatchResponse]]
"""Sends a body to the endpoint at a path and returns its response."""


class InvalidLineError(ValueError):
    """A line that is not sent. code: machine-readable reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def run_lines(
    lines: Iterator[bytes],
    post: Post,
    write: Callable[[Result], object],
    concurrency: int,
    answered: frozenset[str] = frozenset(),
    done: Callable[[], object] = lambda: None,
) -> Counts:
    """Answer every line that is not empty and whose custom_id is not in `answered`.

    Args:
        concurrency: number of requests that run at once.
        done: called after each line.

    Raises:
        Exceptions of `post` and `write`; the other requests are then cancelled.
    """
    counts, seen = Counts(), dict[str, int]()
    numbered = enumerate(lines, 1)

    async def work() -> None:
        for number, line in numbered:  # the iterator is shared: each worker takes the next line
            if not line.strip():
                continue
            result = await answer_line(number, line, post, seen, answered)
            if result is None:
                counts.skipped += 1
            else:
                write(result)
                counts.good += result.good
                counts.failed += not result.good
            done()

    tasks = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # What else they raise is taken as well, or asyncio would log it with a traceback.
        await asyncio.gather(*tasks, return_exceptions=True)
    return counts


async def answer_line(
    number: int, line: bytes, post: Post, seen: dict[str, int], answered: frozenset[str]
) -> Result | None:
    """Return the result of one line; None if an earlier run has answered it. number: of the line, from 1."""
    name = f"batch_req_{uuid.uuid4().hex}"
    try:
        request = parse_line(number, line, seen)
    except InvalidLineError as error:
        return Result(name, custom_id_of(line), error=Failure(error.code, f"line {number}: {error}"))
    if request.custom_id in answered:
        return None
    response = await post(request.url, bytes(request.body))
    while response.status_code == BUSY:
        await asyncio.sleep(RETRY_SECONDS)
        response = await post(request.url, bytes(request.body))
    return Result(name, request.custom_id, response)


def parse_line(number: int, line: bytes, seen: dict[str, int]) -> BatchLine:
    """Parse and check a line, and add its custom_id and its number to `seen`.

    Raises:
        InvalidLineError: the line is malformed, its id has been seen before, or there is no such endpoint.
    """
    try:
        request = msgspec.json.decode(line, type=BatchLine)
        stream = msgspec.json.decode(request.body, type=StreamField).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidLineError("invalid_json_line", f"not a valid request: {error}") from None
    if (earlier := seen.setdefault(request.custom_id, number)) != number:
        message = f"custom_id {quoted(request.custom_id)} is already used by line {earlier}"
        raise InvalidLineError("duplicate_custom_id", message)
    if request.method != "POST":
        raise InvalidLineError("invalid_method", f"method must be POST, got {quoted(request.method)}")
    if request.url not in URLS:
        raise InvalidLineError(
            "invalid_url", f"url must be one of {', '.join(URLS)}, got {quoted(request.url)}"
        )
    if stream:
        raise InvalidLineError("invalid_request", "stream is not supported in a batch")
    return request


def custom_id_of(line: bytes) -> str | None:
    """Return the custom_id of a line that is otherwise invalid; None if it has none."""
    try:
        return msgspec.json.decode(line, type=CustomId).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def write_to(file: IO[bytes], name: str) -> Callable[[Result], None]:
    """Return a function that writes a result as a line at once, so that an interrupted run can be resumed.

    file: without a buffer of its own, if it is a file on a disk. name: of it, for errors.

    That function raises OSError if the file cannot take the whole line, of which then nothing stays in it. After
    that it writes nothing more.
    """
    num_written, failure = 0, ""

    def write(result: Result) -> None:
        nonlocal num_written, failure
        if failure:
            raise OSError(failure)
        rest = memoryview(msgspec.json.encode(result) + b"\n")
        start = file.tell() if file.seekable() else None
        try:
            while rest:
                rest = rest[file.write(rest) :]
            file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            how = ""
            if start is not None:
                with suppress(OSError):  # of a device
                    file.truncate(start)
                how = "; make room, and go on with --resume"
            failure = (
                f"cannot write to {name}: {error.strerror}: {num_written} results of this run are in it{how}"
            )
            raise OSError(failure) from error
        num_written += 1

    return write


def keep_answered(path: Path) -> frozenset[str]:
    """Return the custom_ids that an interrupted run has answered successfully.

    Failed and incomplete lines are dropped from its output file, which is replaced atomically.

    Raises:
        OSError: there is no room for a copy of the answers; the file is as it was.
    """
    if not path.exists():
        return frozenset()
    answered = set()
    kept = path.with_name(path.name + ".resumed")
    try:
        with path.open("rb") as old, kept.open("wb") as new:
            for line in old:
                try:
                    result = msgspec.json.decode(line, type=Result)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue  # the interrupted run wrote only a part of this line
                if result.good and result.custom_id is not None and result.custom_id not in answered:
                    new.write(line.rstrip(b"\n") + b"\n")
                    answered.add(result.custom_id)
    except OSError as error:
        kept.unlink(missing_ok=True)
        raise OSError(f"cannot copy the answers in {path} to {kept.name}: {error.strerror}") from error
    os.replace(kept, path)  # noqa: PTH105
    return frozenset(answered)
