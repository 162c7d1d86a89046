"""Attacks of several kinds in one request, on one connection, or by a crowd at the same moment."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from .attack import (
    ANSWER_SECONDS,
    MAX_ANSWER_BYTES,
    Target,
    ask,
    connected,
    head,
    log_uniform,
    send,
    status_of,
)
from .bodies import ENDPOINTS, drawn
from .grammars import dumps, regex, schema
from .greedy import BASE, GREEDY
from .templates import template

CROWD = 150
PARTS: tuple[str, ...] = ("greedy", "grammar", "template", "tools", "stream", "length", "stop")
HEADERS = (
    *(
        "Authorization",
        "X-Request-Id",
        "X-Request-Timeout",
        "traceparent",
        "tracestate",
        "baggage",
        "X-Forwarded-For",
    ),
    *(
        "Content-Type",
        "Content-Length",
        "Content-Encoding",
        "Accept",
        "Range",
        "If-None-Match",
        "Cookie",
        "Expect",
    ),
    *("Connection", "TE", "Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers"),
)
ODD_TEXTS = (
    "a",
    "\x80",
    "é",
    "\udcff",
    "0",
    "-1",
    "nan",
    "1e999",
    "\u0661",
    "{{",
    "%n",
    "\x1b[2J",
    "\t",
    '"',
)


def fields(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """An endpoint, and a body with something of several attacks."""
    chosen = rng.sample(PARTS, rng.randint(2, 4))
    chat = "template" in chosen or "tools" in chosen
    body: dict[str, Any] = dict(BASE)
    if "greedy" in chosen:
        body |= rng.choice(GREEDY)(rng)
    if "grammar" in chosen:
        body |= rng.choice(({"guided_regex": regex(rng)}, {"guided_json": schema(rng)}))
    if "tools" in chosen:
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema(rng)}}]
        body["tool_choice"] = rng.choice(
            ("required", "none", {"type": "function", "function": {"name": "f"}})
        )
    if "template" in chosen:
        body["chat_template"] = template(rng)
    if "stream" in chosen:
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if "length" in chosen:
        body |= {"n": rng.choice((1, 8, 64)), "max_tokens": rng.choice((1, 1000)), "ignore_eos": True}
    if "stop" in chosen:
        body |= {
            "stop": ["a" * log_uniform(rng, 1, 1000)] * rng.choice((1, 4)),
            "min_tokens": rng.choice((0, 1, 500)),
        }
    if chat:
        body.pop("prompt")
        body["messages"] = [{"role": "user", "content": "Call it."}]
        body["logprobs"] = bool(body.get("logprobs"))
    return ("/v1/chat/completions" if chat else "/v1/completions"), body


async def attack(target: Target, rng: random.Random) -> str:
    """One request of several attacks, to its end or left at any moment."""
    path, body = fields(rng)
    data = dumps(body)
    if rng.random() < 0.6:
        return await ask(target, rng, path, data)
    async with connected(target, rng) as (_, writer):
        await send(writer, head(target, "POST", path, len(data)) + data)
        await asyncio.sleep(rng.random() * rng.choice((0.01, 0.1, 2.0)))
    return "left"


async def crowd(target: Target, rng: random.Random) -> str:
    """Many equal requests at the same moment, all of which are left at the same moment, or answered."""
    path, body = (
        fields(rng) if rng.random() < 0.3 else ("/v1/completions", BASE | {"max_tokens": 200, "stream": True})
    )
    data = dumps(body)
    size = max(1, min(log_uniform(rng, 2, CROWD), (4 << 20) // len(data)))
    leave = rng.random() < 0.6
    seconds = rng.random()

    async def one(source: random.Random) -> str:
        async with connected(target, source) as (reader, writer):
            await send(writer, head(target, "POST", path, len(data)) + data)
            if leave:
                await asyncio.sleep(seconds)
                return "left"
            return await status_of(reader)

    sources = [random.Random(rng.random()) for _ in range(size)]
    answers = await asyncio.gather(*map(one, sources), return_exceptions=True)
    return max((answer for answer in answers if isinstance(answer, str)), default="refused")


async def kept(target: Target, rng: random.Random) -> str:
    """Good and bad requests after each other on one connection."""
    status = "closed"
    async with connected(target, rng) as (reader, writer):
        for _ in range(rng.randint(2, 12)):
            (path,) = rng.choices(list(ENDPOINTS))
            body = drawn(path, rng) if rng.random() < 0.6 else json.dumps(ENDPOINTS[path][1]).encode()
            length = len(body) + rng.choice((0, 0, 0, 0, 1, -1))
            await send(writer, head(target, "POST", path, max(0, length), close=False) + body)
            try:
                answer = await asyncio.wait_for(reader.read(MAX_ANSWER_BYTES), 5.0)
            except (asyncio.TimeoutError, OSError):
                break
            if not answer:
                break
            status = answer.split()[1].decode("latin-1") if answer.startswith(b"HTTP/") else "more"
    return status


async def headers(target: Target, rng: random.Random) -> str:
    """A good request with odd values in the headers that the server reads."""
    size = log_uniform(rng, 1, 8000)
    odd = rng.choice(ODD_TEXTS)
    value = odd * size if rng.random() < 0.3 else odd
    schemes = rng.choices(("", "Bearer ", "Basic "), k=rng.randint(1, 3))
    lines = [f"{rng.choice(HEADERS)}: {scheme}{value}" for scheme in schemes]
    body = json.dumps(BASE).encode()
    method, path = (
        rng.choice(("POST", "POST", "OPTIONS", "GET")),
        rng.choice(("/v1/completions", "/", "/health")),
    )
    start = f"{method} {path} HTTP/1.1"
    given = [start, f"Host: {target.host}:{target.port}", *lines, "Connection: close"]
    if rng.random() < 0.7:
        given.insert(2, f"Authorization: Bearer {target.key}")
    given += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
    async with connected(target, rng) as (reader, writer):
        await send(writer, "\r\n".join(given).encode("utf-8", "surrogateescape") + body)
        status = await status_of(reader, 5.0)
        return "half" if status == "unanswered" else status


async def strangers(target: Target, rng: random.Random) -> str:
    """Large bodies without a key, or with a wrong one: nothing of them should be read, let alone decoded."""
    wrong = Target(target.host, target.port, rng.choice(("", "wrong", "é", "a" * 5000)), target.model, None)
    async with connected(target, rng) as (reader, writer):
        size = log_uniform(rng, 1, 8 << 20)
        (path,) = rng.choices(list(ENDPOINTS))
        sending = asyncio.create_task(send(writer, head(wrong, "POST", path, size) + b"[" * size))
        status = await status_of(reader, ANSWER_SECONDS)
        sending.cancel()
        return status
