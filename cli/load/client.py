"""Load on an OpenAI server: arrivals, and a client that streams and takes times.

    make_queries -> Query -- drive --> stream -> LoadResult

The client often shares its processor with the server it measures, so a chunk costs it one msgspec decode of the
few fields that matter.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

CONNECT_SECONDS = 30.0
MESSAGE_CHARACTERS = 200  # of a server's error, so that it can be told in one line


@dataclass(frozen=True)
class Query:
    """One request: a prompt, as text or token ids, and how many tokens to ask for."""

    prompt: str | list[int]
    max_tokens: int


@dataclass
class LoadResult:
    """What came of a query; times in seconds.

    Attributes:
        late: from when it was due until it was sent.
        ttft: from sending to the first chunk with text. e2e: to the end of the stream.
        last: to the last chunk with text.
        gaps: between chunks with text; one that carries several tokens counts once.
        input_tokens, output_tokens: as the server's `usage` says.
        error: the kind of failure, "" if none. message: more of it.
    """

    late: float = 0.0
    ttft: float = 0.0
    last: float = 0.0
    e2e: float = 0.0
    gaps: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    message: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two."""
        return (self.last - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


# ---------------------------------------------------------------- what a chunk of a stream holds


class Delta(msgspec.Struct, gc=False):
    """What a chunk of a chat adds."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class Choice(msgspec.Struct, gc=False):
    """One choice of a chunk, of either endpoint."""

    text: str | None = None
    delta: Delta | None = None

    @property
    def empty(self) -> bool:
        """True if it carries nothing that was generated."""
        delta = self.delta
        if delta is None:
            return not self.text
        return not (delta.content or delta.reasoning_content or delta.tool_calls)


class Usage(msgspec.Struct, gc=False):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class Chunk(msgspec.Struct, gc=False):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


# ---------------------------------------------------------------- arrivals


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """When requests are due, in seconds from the begin: all at 0 if the rate per second is infinite.

    The time between two is drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less
    comes in bursts, more is steadier.
    """
    rng, due = random.Random(seed), 0.0
    for _ in range(count):
        yield due
        if rate != float("inf"):
            due += rng.gammavariate(burstiness, 1 / (rate * burstiness))


async def drive(
    send: Callable[[Query], Awaitable[LoadResult]],
    queries: Sequence[Query],
    due: Iterable[float],
    concurrency: int | None,
    done: Callable[[LoadResult], object] = lambda reply: None,
) -> tuple[list[LoadResult], float]:
    """Send every query when it is due, at most `concurrency` at once; the replies in order, and the seconds.

    Waiting for one of the `concurrency` places is not counted as late: there the load is a closed loop.
    """
    places = asyncio.Semaphore(concurrency or len(queries) or 1)
    begin = time.perf_counter()

    async def one(query: Query, late: float) -> LoadResult:
        try:
            reply = await send(query)
        finally:
            places.release()
        reply.late = late
        done(reply)
        return reply

    tasks = []
    try:
        for query, moment in zip(queries, due, strict=True):
            await asyncio.sleep(max(0.0, begin + moment - time.perf_counter()))
            late = max(0.0, time.perf_counter() - begin - moment) if concurrency is None else 0.0
            await places.acquire()
            tasks.append(asyncio.create_task(one(query, late)))
        return list(await asyncio.gather(*tasks)), time.perf_counter() - begin
    finally:
        for task in tasks:
            task.cancel()


# ---------------------------------------------------------------- the client


@dataclass(frozen=True)
class Target:
    """What the load is put on.

    Attributes:
        url: of the server, without /v1. api: completions or chat. model: its name there; "" asks the server.
        uds: a unix socket to connect to instead of the url's host.
        extra: more fields of every request. timeout: seconds for a request; None: no limit.
    """

    url: str
    api: str = "completions"
    model: str = ""
    api_key: str | None = None
    uds: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return "/v1/chat/completions" if self.api == "chat" else "/v1/completions"

    def body(self, query: Query) -> bytes:
        """The request's JSON."""
        content: dict[str, Any] = {"prompt": query.prompt}
        if self.api == "chat":
            content = {"messages": [{"role": "user", "content": query.prompt}]}
        return msgspec.json.encode(
            {"model": self.model, **content, "max_tokens": query.max_tokens, **self.extra}
            | {"stream": True, "stream_options": {"include_usage": True}}
        )


class LoadClient:
    """Connections to a target; made by `connected`."""

    def __init__(self, http: aiohttp.ClientSession, target: Target) -> None:
        self.http, self.target = http, target

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer of another endpoint: GET, or POST with a body.

        Raises:
            OSError: no server, or an error status.
        """
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        try:
            async with self.http.request(method, path, data=data) as response:
                content = await response.read()
                if response.status != 200:
                    raise OSError(f"{path}: {response.status}: {shortened(content)}")
                return msgspec.json.decode(content)
        except (aiohttp.ClientError, asyncio.TimeoutError, msgspec.DecodeError) as error:
            raise OSError(f"{path}: {error or type(error).__name__}") from error

    async def stream(self, query: Query) -> LoadResult:
        """Send a query and take its stream to the end. A failure is told in the reply."""
        reply, body = LoadResult(), self.target.body(query)
        begin = time.perf_counter()
        try:
            async with self.http.post(self.target.path, data=body) as response:
                if response.status != 200:
                    reply.error = f"HTTP {response.status}"
                    reply.message = shortened(await response.read())
                    return reply
                await self._read(response, reply, begin)
        except asyncio.TimeoutError:
            reply.error = "timeout"
        except aiohttp.ClientConnectorError as error:
            reply.error, reply.message = "cannot connect", str(error)
        except (aiohttp.ClientError, OSError) as error:
            reply.error, reply.message = "disconnected", str(error) or type(error).__name__
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reply.error, reply.message = "malformed chunk", str(error)
        reply.e2e = time.perf_counter() - begin
        return reply

    async def _read(self, response: aiohttp.ClientResponse, reply: LoadResult, begin: float) -> None:
        rest = b""
        async for data in response.content.iter_any():
            now = time.perf_counter() - begin
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    return
                chunk = decode_chunk(event)
                if chunk.error is not None:
                    reply.error, reply.message = (
                        "error in stream",
                        shortened(msgspec.json.encode(chunk.error)),
                    )
                    return
                if chunk.usage is not None:
                    reply.input_tokens = chunk.usage.prompt_tokens
                    reply.output_tokens = chunk.usage.completion_tokens or 0
                if chunk.choices and not chunk.choices[0].empty:
                    if reply.ttft:
                        reply.gaps.append(now - reply.last)
                    else:
                        reply.ttft = now
                    reply.last = now
        reply.error = "disconnected"
        reply.message = "the stream ended without [DONE]"


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[LoadClient]:
    """A client of the target, its connections closed at the end."""
    connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0)
    if target.uds:
        connector = aiohttp.UnixConnector(target.uds, limit=0)
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    limit = aiohttp.ClientTimeout(total=target.timeout, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(
        target.url, connector=connector, headers=headers, timeout=limit, read_bufsize=1 << 18
    ) as http:
        yield LoadClient(http, target)


def shortened(content: bytes) -> str:
    """The message of an error's body, in one line."""
    try:
        found = msgspec.json.decode(content)
        found = found.get("error", found)
        text = found if isinstance(found, str) else str(found.get("message", found))
    except (msgspec.DecodeError, AttributeError):
        text = content.decode(errors="replace")
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_CHARACTERS else text[: MESSAGE_CHARACTERS - 3] + "..."
