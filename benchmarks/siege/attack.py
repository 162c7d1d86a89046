"""What an attack is, and what it may use: connections to the server under siege, on loopback only."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

MAX_ANSWER_BYTES = 64 << 20  # read of one answer; what is longer is left, and the connection closed
CONNECT_SECONDS = 20.0
REQUEST_SECONDS = 8  # the time that attacks give the server for a request (X-Request-Timeout)
ANSWER_SECONDS = 40.0  # a server that has not answered a whole request by then hangs
UNANSWERED = "unanswered"
SERVER_ERROR = "500"
SHOWN_BYTES = 300  # of the answer with a server error
CR_LF = b"\r\n"
SOURCES = tuple(f"127.0.0.{number}" for number in range(2, 10))  # the addresses that attackers come from


@dataclass(frozen=True)
class Target:
    """What is attacked.

    model: its name. address: of the core's socket, if attackers can reach it.
    keys: folder of the CURVE certificates (`fortress.RIGHTS`) for that socket; empty: it asks for none.
    pictures: name of a model that takes pictures; empty: there is none.
    """

    host: str
    port: int
    key: str
    model: str
    address: str | None
    keys: str = ""
    pictures: str = ""


Attack: TypeAlias = Callable[[Target, random.Random], Awaitable[str]]


@dataclass(frozen=True)
class Attacker:
    """A kind of attack.

    attack: carries one out, and returns in a word what came of it: a status, "closed", `UNANSWERED`.
    per_second: most attacks in a second. loops: attacks at the same time. on_core: it needs a core's own socket.
    """

    name: str
    attack: Attack
    per_second: float
    loops: int = 1
    on_core: bool = False


Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(target: Target, rng: random.Random) -> AsyncIterator[Connection]:
    """A connection to the server from one of `SOURCES`; it is cut, not closed, in the end.

    Raises:
        OSError: the server does not accept it, or not in time.
    """
    connecting = asyncio.open_connection(target.host, target.port, local_addr=(rng.choice(SOURCES), 0))
    try:
        reader, writer = await awaited(connecting, CONNECT_SECONDS)
    except asyncio.TimeoutError:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(
    target: Target, method: str, path: str, length: int | None, *lines: str, close: bool = True
) -> bytes:
    """The first lines of a request. length: of its body, which is JSON; None: it has none."""
    fields = [f"{method} {path} HTTP/1.1", f"Host: {target.host}:{target.port}"]
    fields += [f"Authorization: Bearer {target.key}", f"X-Request-Timeout: {REQUEST_SECONDS}", *lines]
    if length is not None:
        fields += ["Content-Type: application/json", f"Content-Length: {length}"]
    if close:
        fields.append("Connection: close")
    return "\r\n".join([*fields, "", ""]).encode("utf-8", "surrogateescape")


async def status_of(reader: asyncio.StreamReader, seconds: float = ANSWER_SECONDS) -> str:
    """Read an answer to its end. Returns its status (a server error's with its text), "closed" without one,
    `UNANSWERED` after `seconds`.
    """
    answer: list[str] = []
    try:
        await awaited(_read(reader, answer), seconds)
    except asyncio.TimeoutError:
        return UNANSWERED
    except (OSError, ValueError):
        pass
    return answer[0] if answer else "closed"


async def _read(reader: asyncio.StreamReader, answer: list[str]) -> None:
    line = (await reader.readline()).split()
    if len(line) > 1 and line[0].startswith(b"HTTP/"):
        answer.append(line[1].decode("latin-1"))
    size, start = 0, b""
    while size < MAX_ANSWER_BYTES and (data := await reader.read(1 << 18)):
        size += len(data)
        start = start or data
    if answer == [SERVER_ERROR]:
        answer[0] += f": {start.rpartition(CR_LF * 2)[2][:SHOWN_BYTES].decode('utf-8', 'replace')}"


def queued_seconds() -> float:
    """Seconds in which the main thread of this process waited for a processor; 0 where the system does not say.

    The second number of /proc/self/schedstat, in ns (Linux, Documentation/scheduler/sched-stats.rst).
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


async def awaited(work: Awaitable[Any], seconds: float) -> Any:
    """As `asyncio.wait_for`, for seconds in which this process may run: one that ends late counts as one, and time
    in which it waits for a processor does not count.

    The attackers have a low priority, so they may stand still for seconds while the server has work for all
    processors.

    Raises:
        asyncio.TimeoutError: it takes longer.
    """
    task = asyncio.ensure_future(work)
    try:
        while seconds > 0:
            begin, queued = time.monotonic(), queued_seconds()
            if (await asyncio.wait({task}, timeout=min(1.0, seconds)))[0]:
                return task.result()
            seconds -= min(1.0, time.monotonic() - begin - (queued_seconds() - queued))
        raise asyncio.TimeoutError
    finally:
        task.cancel()


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write all of `data`; a server that has closed the connection is no error, since it may have answered."""
    try:
        if not writer.transport.is_closing():
            writer.write(data)
        await awaited(writer.drain(), ANSWER_SECONDS)
    except (OSError, asyncio.TimeoutError):
        pass


async def ask(
    target: Target, rng: random.Random, path: str, body: bytes | None, *lines: str, method: str = "POST"
) -> str:
    """Send a request and read its answer; the status, as `status_of`."""
    async with connected(target, rng) as (reader, writer):
        length = None if body is None else len(body)
        await send(writer, head(target, method, path, length, *lines) + (body or b""))
        return await status_of(reader)


async def post(target: Target, rng: random.Random, path: str, fields: dict[str, Any]) -> str:
    """Post a JSON object; as `ask`."""
    return await ask(target, rng, path, json.dumps(fields).encode())


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """A size between `low` and `high`: as often of few digits as of many."""
    return round(low * (high / low) ** rng.random())
