"""Clients that send or read too slowly, or do not read at all."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
from typing import Any

from .attack import SOURCES, Target, connected, head, send

PATIENCE_SECONDS = 6.0  # how long a slow client stays
CRUMB_SECONDS = 0.01  # between pieces: without a pause, other attackers would have no processor
MANY_TOKENS = 800
CHUNKED = "Transfer-Encoding: chunked"
SMALL_BUFFER = 4096  # bytes that the kernel takes for a client that does not read


async def sender(target: Target, rng: random.Random) -> str:
    """Send a request byte by byte, then leave."""
    body = b'{"prompt": "A list is", "max_tokens": 2}'
    data = head(target, "POST", "/v1/completions", len(body)) + body
    data = data[rng.choice((0, len(data) - len(body) - 1)) :] if rng.random() < 0.1 else data
    pause = PATIENCE_SECONDS / len(data)
    async with connected(target, rng) as (_, writer):
        for place in range(len(data) if rng.random() < 0.5 else len(data) - 1):
            if writer.transport.is_closing():
                return "closed"
            await send(writer, data[place : place + 1])
            await asyncio.sleep(pause)
    return "left"


async def crumbs(target: Target, rng: random.Random) -> str:
    """Send a body in chunks of one byte, without an end, with or without a key."""
    stranger = dataclasses.replace(target, key=target.key if rng.random() < 0.3 else "stranger")
    piece = b"1\r\n \r\n" * rng.choice((1, 100, 10_000))
    start = head(stranger, "POST", rng.choice(("/v1/completions", "/health")), None, CHUNKED, close=False)
    end = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    async with connected(target, rng) as (_, writer):
        await send(writer, start)
        while asyncio.get_running_loop().time() < end:
            if writer.transport.is_closing():
                return "closed"
            await send(writer, piece)
            await asyncio.sleep(CRUMB_SECONDS)
    return "left"


async def reader(target: Target, rng: random.Random) -> str:
    """Ask for much and read little of it, or nothing."""
    fields: dict[str, Any] = {
        "prompt": "The list",
        "max_tokens": MANY_TOKENS,
        "ignore_eos": True,
        "n": rng.choice((1, 4, 16)),
        "logprobs": rng.choice((None, 5, 20)),
        "stream": rng.random() < 0.7,
        "seed": rng.randrange(1000),
        "timeout": PATIENCE_SECONDS,
    }
    body = json.dumps(fields).encode()
    try:
        await read_slowly(target, rng, head(target, "POST", "/v1/completions", len(body)) + body)
    except asyncio.TimeoutError:
        pass  # it was not accepted, or there was nothing to read yet
    return "left"


async def read_slowly(target: Target, rng: random.Random, request: bytes) -> None:
    """Send a request over a connection with a small buffer, and read a little of the answer."""
    pace = rng.choice((0, 0, 1, 1000))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        connection.setblocking(False)
        connection.bind((rng.choice(SOURCES), 0))
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(loop.sock_connect(connection, (target.host, target.port)), PATIENCE_SECONDS)
        await loop.sock_sendall(connection, request)
        end = loop.time() + PATIENCE_SECONDS
        while loop.time() < end:
            if pace and not await asyncio.wait_for(loop.sock_recv(connection, pace), PATIENCE_SECONDS):
                break
            await asyncio.sleep(0.1)
