"""HTTP as no client speaks it: without end, in halves, too fast, of another version, or not at all."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

from .attack import ANSWER_SECONDS, UNANSWERED, Target, connected, head, log_uniform, send, status_of

IDLE_CONNECTIONS = 250
IDLE_SECONDS = 5.0
ENDLESS_BYTES = 4 << 20
HALF_SECONDS = 2.0  # after a half request the attacker waits this long for an answer, which need not come
PATHS = (
    "/health",
    "/v1/models",
    "/metrics",
    "/v1/completions",
    "/",
    "/v1/responses/x",
    "/nowhere",
    "*",
    "//",
    "/%00",
)
BODY = b'{"prompt": "A list is", "max_tokens": 2}'


async def requests(target: Target, rng: random.Random) -> str:
    """One odd request, whole or without an end."""
    odd = rng.choice(ODD)
    data, whole = odd(target, rng), odd not in ENDLESS
    async with connected(target, rng) as (reader, writer):
        sending = asyncio.create_task(send(writer, data))
        status = await status_of(reader, ANSWER_SECONDS if whole else HALF_SECONDS)
        sending.cancel()
    return "half" if status == UNANSWERED and not whole else status


def endless_headers(target: Target, rng: random.Random) -> bytes:
    """Headers that never come to their end."""
    start = head(target, "GET", rng.choice(PATHS), None)[:-2]
    line = rng.choice((b"X: " + b"a" * 100 + b"\r\n", b"Cookie: a\r\n", b" folded\r\n", b"a:\r\n"))
    return start + line * (log_uniform(rng, 1 << 10, ENDLESS_BYTES) // len(line))


def endless_line(target: Target, rng: random.Random) -> bytes:
    """A URL, a header's name, value or method without an end."""
    long = rng.choice((b"a", b"%41", b"/", b"?a=b&", b"\xff", b"../")) * log_uniform(
        rng, 100, ENDLESS_BYTES // 6
    )
    host = f"Host: {target.host}:{target.port}\r\n".encode()
    return rng.choice(
        (b"GET /" + long, long, b"GET / HTTP/1.1\r\n" + host + long, b"GET / HTTP/1.1\r\nX: " + long)
    )


def long_line(target: Target, rng: random.Random) -> bytes:
    """A whole request with a long URL, or a long header."""
    long = rng.choice(("a", "%41", "/", "?a=b&", "../")) * log_uniform(rng, 100, 1 << 18)
    if rng.random() < 0.5:
        return head(target, "GET", f"/{long}", None)
    return head(
        target,
        "GET",
        rng.choice(PATHS),
        None,
        f"{rng.choice(('X', 'Cookie', 'X-Request-Id', 'Host'))}: {long}",
    )


def many_headers(target: Target, rng: random.Random) -> bytes:
    """A whole request of very many headers."""
    return head(target, "GET", "/health", None, *(f"x-{i}: {i}" for i in range(log_uniform(rng, 10, 50_000))))


def half(target: Target, rng: random.Random) -> bytes:
    """A request that stops somewhere."""
    whole = head(target, "POST", "/v1/completions", len(BODY)) + BODY
    return whole[: rng.randrange(1, len(whole) - 1)]


def pipelined(target: Target, rng: random.Random) -> bytes:
    """Many requests at once on one connection."""
    one = head(target, "POST", "/v1/completions", len(BODY), close=False) + BODY
    if rng.random() < 0.5:
        one = head(target, "GET", rng.choice(PATHS), None, close=False)
    return one * log_uniform(rng, 1, 300) + head(target, "GET", "/health", None)


def hosts(target: Target, rng: random.Random) -> bytes:
    """Without a Host, with two, or with that of another site."""
    host = f"{target.host}:{target.port}"
    lines = rng.choice(
        (
            [],
            [f"Host: {host}", "Host: evil.example"],
            ["Host: evil.example"],
            [f"Host: {host}@evil.example"],
            ["Host: " + "a" * 70_000],
            [f"Host: {host}", "Origin: http://evil.example"],
            ["Host:"],
            ["Host: [::1"],
        )
    )
    start = f"{rng.choice(('GET', 'POST', 'OPTIONS'))} {rng.choice(PATHS)} HTTP/1.1"
    return "\r\n".join(
        [start, *lines, f"Authorization: Bearer {target.key}", "Connection: close", "", ""]
    ).encode()


def versions(target: Target, rng: random.Random) -> bytes:
    """Another version, another method, another protocol."""
    host = f"Host: {target.host}:{target.port}\r\nConnection: close\r\n\r\n".encode()
    return rng.choice(
        (
            b"GET /health\r\n\r\n",
            b"GET /v1/models HTTP/0.9\r\n\r\n",
            b"GET /health HTTP/1.0\r\n\r\n",
            b"GET /health HTTP/3.0\r\n" + host,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
            b"BREW /health HTTP/1.1\r\n" + host,
            b"CONNECT evil.example:80 HTTP/1.1\r\n" + host,
            b"TRACE / HTTP/1.1\r\n" + host,
            b"GET http://evil.example/ HTTP/1.1\r\n" + host,
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(508),
            b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AAAA\r\n"
            + host,
            rng.randbytes(log_uniform(rng, 1, 1 << 16)) + b"\r\n\r\n",
            b"\r\n" * log_uniform(rng, 1, 1 << 16) + b"GET /health HTTP/1.1\r\n" + host,
            b"\0" * 100 + b"\r\n\r\n",
        )
    )


def chunked(target: Target, rng: random.Random) -> bytes:
    """A body in chunks: of a byte each, with odd sizes, extensions, trailers, or with a length beside."""
    lines = ["Transfer-Encoding: chunked", "Content-Type: application/json"]
    if rng.random() < 0.3:
        lines.append(f"Content-Length: {rng.choice((0, 5, 10**20, -1))}")
    if rng.random() < 0.2:
        lines.append(
            rng.choice(
                ("Transfer-Encoding: identity", "Transfer-Encoding: gzip, chunked", "Expect: 100-continue")
            )
        )
    start = head(target, "POST", "/v1/completions", None, *lines)
    single = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    return start + rng.choice(
        (
            single + b"0\r\n\r\n",
            b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(BODY), b"e" * log_uniform(rng, 1, 1 << 18), BODY),
            single + b"0\r\n" + b"X: y\r\n" * log_uniform(rng, 1, 20_000) + b"\r\n",
            b"ffffffffffffffffff\r\n" + BODY,
            b"-1\r\n" + BODY + b"\r\n0\r\n\r\n",
            b"0" * log_uniform(rng, 1, 1 << 18) + b"\r\n\r\n",
            b"zz\r\n\r\n",
        )
    )


def long_bodies(target: Target, rng: random.Random) -> bytes:
    """A request whose body is longer or shorter than its Content-Length, or of a type that is refused."""
    length = rng.choice((0, 1, len(BODY) - 1, len(BODY) + 1, 1 << 30, 10**30))
    lines = rng.choice(
        ((), ("Content-Encoding: gzip",), ("Content-Type: text/plain",), ("Expect: 100-continue",))
    )
    return head(target, "POST", "/v1/completions", length, *lines) + BODY * log_uniform(rng, 1, 10_000)


def content_types(target: Target, rng: random.Random) -> bytes:
    """Long and odd content types, also of forms."""
    kind = rng.choice(("multipart/form-data", "application/json", "text/plain"))
    piece = rng.choice((";", "; a=b", '; a="', "; a*0=b", " ", "; boundary=b"))
    line = f"Content-Type: {kind}{piece * (log_uniform(rng, 1, 60_000) // len(piece))}"
    path = rng.choice(("/v1/audio/transcriptions", "/v1/completions"))
    return head(target, "POST", path, None, line, f"Content-Length: {len(BODY)}") + BODY


def queries(target: Target, rng: random.Random) -> bytes:
    """Odd paths and queries of endpoints that take them."""
    number = rng.choice(("-1000000000000000", "9" * 30, "-1", "0", "1e3", "x", "", "9" * 5000, "%2d1"))
    path = rng.choice(
        (
            f"/v1/responses/resp_x?stream=true&starting_after={number}",
            f"/v1/responses/{number}/input_items?order={number}",
            f"/v1/responses/{'x' * log_uniform(rng, 1, 60_000)}",
            f"/v1/models/{'%2F' * log_uniform(rng, 1, 10_000)}",
            f"/sleep?level={number}",
            f"/openapi.json?{number}",
            "/metrics?" + "&".join(f"a{index}=1" for index in range(log_uniform(rng, 1, 5_000))),
        )
    )
    return head(target, rng.choice(("GET", "GET", "POST", "DELETE", "HEAD", "OPTIONS")), path, 0)


ENDLESS = (endless_headers, endless_line, half, chunked, long_bodies)
ODD = (*ENDLESS, long_line, many_headers, pipelined, hosts, versions, queries, content_types)


async def idle(target: Target, rng: random.Random) -> str:
    """Many connections that send nothing, or the beginning of a request, and stay for a while."""
    begin = rng.choice(
        (b"", b"", b"G", head(target, "GET", "/health", None)[:-2], b"POST /v1/completions HTTP/1.1\r\n")
    )
    opened = 0
    async with AsyncExitStack() as stack:
        for _ in range(rng.randint(1, IDLE_CONNECTIONS)):
            try:
                _, writer = await stack.enter_async_context(connected(target, rng))
            except (OSError, asyncio.TimeoutError):
                break  # the server need not take more
            opened += 1
            await send(writer, begin)
        await asyncio.sleep(rng.random() * IDLE_SECONDS)
    return "held" if opened else "refused"


async def churn(target: Target, rng: random.Random) -> str:
    """Connections that are made and cut at once, before or after a request."""
    for _ in range(rng.randint(1, 50)):
        async with connected(target, rng) as (_, writer):
            if rng.random() < 0.5:
                await send(writer, head(target, "POST", "/v1/completions", len(BODY)) + BODY)
    return "cut"
