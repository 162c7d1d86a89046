"""OpenAI batch files: a request per line in, an answer per line out, in the order in which they come.

lines --> [concurrency] x (check, post) --> write
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
BUSY = 429
RETRY_SECONDS = 1.0


class Request(msgspec.Struct):
    """A line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Streaming(msgspec.Struct):
    """The one field of a request's body that matters here."""

    stream: bool | None = None


class Named(msgspec.Struct):
    """What may be known of a line that is wrong."""

    custom_id: str | None = None


class Response(msgspec.Struct):
    """What the endpoint answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct):
    """Why there is no answer."""

    code: str
    message: str


class Result(msgspec.Struct):
    """A line of the output. An answer with an error status is in `response`; `error` tells that there is none."""

    id: str
    custom_id: str | None
    response: Response | None = None
    error: Failure | None = None

    @property
    def good(self) -> bool:
        """True if the request succeeded."""
        return self.response is not None and self.response.status_code == 200


@dataclass
class Counts:
    """How many lines came to what."""

    good: int = 0
    failed: int = 0
    skipped: int = 0


Post = Callable[[str, bytes], Awaitable[Response]]
"""Sends a body to an endpoint."""


class Refused(ValueError):
    """A line that is not sent. code: for programs."""

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
    """Answer every line that is not empty and whose custom_id has not been `answered`; so many at once.

    Raises:
        Whatever `post` and `write` raise; what runs is cancelled then.
    """
    counts, seen = Counts(), set[str]()

    async def work() -> None:
        for line in lines:  # shared: each line goes to whoever is free
            if not line.strip():
                continue
            result = await answer(line, post, seen, answered)
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
    return counts


async def answer(line: bytes, post: Post, seen: set[str], answered: frozenset[str]) -> Result | None:
    """The output for one line; None if there is one already."""
    name = f"batch_req_{uuid.uuid4().hex}"
    try:
        request = checked(line, seen)
    except Refused as error:
        return Result(name, custom_id_of(line), error=Failure(error.code, str(error)))
    if request.custom_id in answered:
        return None
    response = await post(request.url, bytes(request.body))
    while response.status_code == BUSY:  # others use this core as well: there is no hurry
        await asyncio.sleep(RETRY_SECONDS)
        response = await post(request.url, bytes(request.body))
    return Result(name, request.custom_id, response)


def checked(line: bytes, seen: set[str]) -> Request:
    """The request of a line; its custom_id is noted in `seen`.

    Raises:
        Refused: it is malformed, its id was seen before, or there is no such endpoint.
    """
    try:
        request = msgspec.json.decode(line, type=Request)
        stream = msgspec.json.decode(request.body, type=Streaming).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused("invalid_json_line", f"not a valid line: {error}") from None
    if request.custom_id in seen:
        raise Refused(
            "duplicate_custom_id", f"custom_id {request.custom_id!r} stands in an earlier line, too"
        )
    seen.add(request.custom_id)
    if request.method != "POST":
        raise Refused("invalid_method", f"method must be POST, got {request.method!r}")
    if request.url not in URLS:
        raise Refused("invalid_url", f"url must be one of {', '.join(URLS)}, got {request.url!r}")
    if stream:
        raise Refused("invalid_request", "stream has no place in a batch")
    return request


def custom_id_of(line: bytes) -> str | None:
    """The custom_id of a line that is wrong otherwise; None if there is none."""
    try:
        return msgspec.json.decode(line, type=Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def write_to(file: IO[bytes]) -> Callable[[Result], None]:
    """Writes results as lines, each at once, so that whoever reads along or resumes has all there is."""

    def write(result: Result) -> None:
        file.write(msgspec.json.encode(result) + b"\n")
        file.flush()

    return write


def keep_answered(path: Path) -> frozenset[str]:
    """The custom_ids that a run which was cut short has answered. Other lines are dropped from its output, which
    is replaced in one piece.
    """
    if not path.exists():
        return frozenset()
    answered = set()
    kept = path.with_name(path.name + ".resumed")
    with path.open("rb") as old, kept.open("wb") as new:
        for line in old:
            try:
                result = msgspec.json.decode(line, type=Result)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # cut off in its midst
            if result.good and result.custom_id is not None and result.custom_id not in answered:
                new.write(line.rstrip(b"\n") + b"\n")
                answered.add(result.custom_id)
    os.replace(kept, path)  # noqa: PTH105
    return frozenset(answered)
