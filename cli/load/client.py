"""Load on an OpenAI server: arrival times, and a client that streams answers and measures them.

    make_queries -> LoadQuery -- drive --> stream -> LoadResult

The client often shares a processor with the server it measures, so it decodes only the few fields of a chunk that
it needs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

CONNECT_SECONDS = 30.0
MESSAGE_CHARACTERS = 200  # a server's error message is cut to this length, to fit on a line
ADMIN = {"X-Pagewire-Admin": "1"}  # the header that a server without keys wants from operators


@dataclass(frozen=True)
class LoadQuery:
    """One request: a prompt (text or token ids) and the number of tokens to generate."""

    prompt: str | list[int]
    max_tokens: int


@dataclass
class LoadResult:
    """Measurements of one query; times are in seconds.

    Attributes:
        late: delay between the time the query was due and the time it was sent.
        ttft: time from sending to the first chunk with text. e2e: time to the end of the stream.
        last: time to the last chunk with text.
        gaps: times between chunks with text; a chunk of several tokens counts once.
        input_tokens, output_tokens: token counts from the server's `usage`.
        error: kind of failure, "" if none. message: details of the failure.
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


# ---------------------------------------------------------------- the JSON of a stream's chunk


class StreamDelta(msgspec.Struct, gc=False):
    """The text that a chunk of a chat completion adds."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class Choice(msgspec.Struct, gc=False):
    """One choice of a chunk, from either endpoint."""

    text: str | None = None
    delta: StreamDelta | None = None

    @property
    def empty(self) -> bool:
        """True if the chunk holds no generated text."""
        delta = self.delta
        if delta is None:
            return not self.text
        return not (delta.content or delta.reasoning_content or delta.tool_calls)


class StreamUsage(msgspec.Struct, gc=False):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class Chunk(msgspec.Struct, gc=False):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: StreamUsage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


# ---------------------------------------------------------------- arrivals


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Yield the times at which requests are due, in seconds from the start.

    rate: requests per second; infinite: all are due at 0.
    burstiness: shape of the gamma distribution of the time between two requests. 1 is a Poisson process, less
    gives bursts, more gives steadier arrivals.
    """
    rng, due = random.Random(seed), 0.0
    for _ in range(count):
        yield due
        if rate != float("inf"):
            due += rng.gammavariate(burstiness, 1 / (rate * burstiness))


async def drive(
    send: Callable[[LoadQuery], Awaitable[LoadResult]],
    queries: Sequence[LoadQuery],
    due: Iterable[float],
    concurrency: int | None,
    done: Callable[[LoadResult], object] = lambda result: None,
) -> tuple[list[LoadResult], float]:
    """Send every query when it is due, at most `concurrency` at once; return results in order and total seconds.

    With a `concurrency` limit the load is a closed loop, so waiting for a place does not count as late.
    """
    places = asyncio.Semaphore(concurrency or len(queries) or 1)
    begin = time.perf_counter()

    async def send_one(query: LoadQuery, late: float) -> LoadResult:
        try:
            result = await send(query)
        finally:
            places.release()
        result.late = late
        done(result)
        return result

    tasks = []
    try:
        for query, moment in zip(queries, due, strict=True):
            await asyncio.sleep(max(0.0, begin + moment - time.perf_counter()))
            late = max(0.0, time.perf_counter() - begin - moment) if concurrency is None else 0.0
            await places.acquire()
            tasks.append(asyncio.create_task(send_one(query, late)))
        return list(await asyncio.gather(*tasks)), time.perf_counter() - begin
    finally:
        for task in tasks:
            task.cancel()


# ---------------------------------------------------------------- the client


@dataclass(frozen=True)
class Target:
    """The server that receives the load.

    Attributes:
        url: URL of the server, without /v1. api: "completions" or "chat".
        model: the model's name on the server; "" takes the first that the server lists.
        uds: path of a Unix socket to connect to instead of the URL's host.
        extra: additional fields of every request. timeout: seconds for a request; None: no limit.
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
        """Path of the endpoint."""
        return "/v1/chat/completions" if self.api == "chat" else "/v1/completions"

    def body(self, query: LoadQuery) -> bytes:
        """Return the request body of a query as JSON."""
        content: dict[str, Any] = {"prompt": query.prompt}
        if self.api == "chat":
            content = {"messages": [{"role": "user", "content": query.prompt}]}
        return msgspec.json.encode(
            {"model": self.model, **content, "max_tokens": query.max_tokens, **self.extra}
            | {"stream": True, "stream_options": {"include_usage": True}}
        )


class LoadClient:
    """An HTTP client for a target, created by `connected`."""

    def __init__(self, http: aiohttp.ClientSession, target: Target) -> None:
        self.http, self.target = http, target

    async def call(
        self, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Call another endpoint (GET, or POST if there is a body) and return its decoded JSON.

        Raises:
            OSError: the server cannot be reached, or answers with an error status.
        """
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        try:
            async with self.http.request(method, path, data=data, headers=headers) as response:
                content = await response.read()
                if response.status != 200:
                    raise OSError(f"{path}: {response.status}: {shortened(content)}")
                return msgspec.json.decode(content)
        except (aiohttp.ClientError, asyncio.TimeoutError, msgspec.DecodeError) as error:
            raise OSError(f"{path}: {error or type(error).__name__}") from error

    @asynccontextmanager
    async def profiled(self, wanted: bool) -> AsyncIterator[None]:
        """Let the server's workers record a profile meanwhile, if `wanted`; the server needs `--enable-admin`.

        Raises:
            OSError: as `call`.
        """
        if wanted:
            await self.call("/start_profile", {}, ADMIN)
        try:
            yield
        finally:
            if wanted:
                await self.call("/stop_profile", {}, ADMIN)

    async def stream(self, query: LoadQuery) -> LoadResult:
        """Send a query, read its stream to the end, and return the measurements. A failure is in `error`."""
        result, body = LoadResult(), self.target.body(query)
        begin = time.perf_counter()
        try:
            async with self.http.post(self.target.path, data=body) as response:
                if response.status != 200:
                    result.error = f"HTTP {response.status}"
                    result.message = shortened(await response.read())
                    return result
                await self._read(response, result, begin)
        except asyncio.TimeoutError:
            result.error = "timeout"
        except aiohttp.ClientConnectorError as error:
            result.error, result.message = "cannot connect", str(error)
        except (aiohttp.ClientError, OSError) as error:
            result.error, result.message = "disconnected", str(error) or type(error).__name__
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            result.error, result.message = "malformed chunk", str(error)
        result.e2e = time.perf_counter() - begin
        return result

    async def _read(self, response: aiohttp.ClientResponse, result: LoadResult, begin: float) -> None:
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
                    result.error, result.message = (
                        "error in stream",
                        shortened(msgspec.json.encode(chunk.error)),
                    )
                    return
                if chunk.usage is not None:
                    result.input_tokens = chunk.usage.prompt_tokens
                    result.output_tokens = chunk.usage.completion_tokens or 0
                if chunk.choices and not chunk.choices[0].empty:
                    if result.ttft:
                        result.gaps.append(now - result.last)
                    else:
                        result.ttft = now
                    result.last = now
        result.error = "disconnected"
        result.message = "the stream ended without [DONE]"


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[LoadClient]:
    """Yield a client of the target; its connections are closed on exit."""
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
    """Return the message of an error response in one line of at most `MESSAGE_CHARACTERS`."""
    try:
        fields = msgspec.json.decode(content)
        error = fields.get("error", fields)
        text = error if isinstance(error, str) else str(error.get("message", error))
    except (msgspec.DecodeError, AttributeError):
        text = content.decode(errors="replace")
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_CHARACTERS else text[: MESSAGE_CHARACTERS - 3] + "..."
