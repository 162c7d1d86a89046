"""Messages to the core's socket that no frontend of ours would send; and bytes that are no messages."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pagewire.ipc.version import __version__
from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.messages import PROTOCOL, Abort, Call, Goodbye, Hello, Ping, Submit
from pagewire.ipc.wire.sockets import CurveKeys

from .attack import Target, awaited, log_uniform
from .values import Values, struct_type

KINDS = [struct_type(kind) for kind in (Hello, Submit, Submit, Submit, Abort, Call, Ping, Goodbye)]
WAIT_SECONDS = 3.0  # for an answer of the core, which some messages do not have
STAY_SECONDS = 3.0  # of a frontend that does not read
MESSAGES = 50
LINGER_MS = 500  # for what was sent just before the end
FILLING = 1300  # large answers that fill the queue to a frontend which does not read
# Calls that any frontend may make, and that change what others see: no attacks, if their arguments are right.
LEFT_OUT = ("pause", "sleep", "abort_request", "start_profile", "stop_profile", "save_sharded_state")

_context: zmq.asyncio.Context | None = None


def context() -> zmq.asyncio.Context:
    """The context of this process."""
    global _context
    _context = _context or zmq.asyncio.Context()
    return _context


@contextmanager
def dealer(
    target: Target, rng: random.Random, high_water: int = 1000, name: str = "attacker"
) -> Iterator[zmq.asyncio.Socket]:
    """A connection to the core as frontends have them. name: of its certificate, where the core asks for one."""
    assert target.address is not None
    socket = context().socket(zmq.DEALER)
    socket.linger, socket.rcvhwm = LINGER_MS, high_water
    if target.keys:
        keys = CurveKeys.load(Path(target.keys, f"{name}.key_secret"), Path(target.keys, "core.key"))
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.curve_serverkey = keys.server
    socket.identity = b"\1" + rng.randbytes(rng.choice((4, 16, 200)))
    socket.connect(target.address)
    try:
        yield socket
    finally:
        socket.close()


def hello(rng: random.Random) -> bytes:
    """A greeting that is accepted, of a frontend with an odd name."""
    return msgspec.msgpack.encode(Hello(PROTOCOL, __version__, os.getpid(), Values(rng).text()[:1000]))


async def attach(socket: zmq.asyncio.Socket, rng: random.Random) -> str:
    """Greet the core; the kind of its answer."""
    await socket.send(hello(rng))
    return await answered(socket)


async def answered(socket: zmq.asyncio.Socket, seconds: float = WAIT_SECONDS) -> str:
    """The kind of the next message of the core; "silent" if none comes."""
    if not await socket.poll(round(1e3 * seconds)):
        return "silent"
    frame = (await socket.recv_multipart())[0]
    try:
        return str(msgspec.msgpack.decode(frame, type=dict[str, Any]).get("type"))
    except (msgspec.DecodeError, RecursionError):
        return "unreadable"


async def push(socket: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """Send a message; False if the core does not take it."""
    try:
        await awaited(socket.send_multipart(frames), WAIT_SECONDS)
    except (asyncio.TimeoutError, zmq.ZMQError):
        return False
    return True


async def messages(target: Target, rng: random.Random) -> str:
    """Random messages of the protocol, right, wrong and damaged, before or after a greeting."""
    values = Values(rng, wild=rng.choice((0.0, 0.02, 0.1)), large=rng.choice((0.0, 0.02, 0.1)), packed=True)
    with dealer(target, rng) as socket:
        said = await attach(socket, rng) if rng.random() < 0.8 else ""
        for _ in range(log_uniform(rng, 1, MESSAGES)):
            if rng.random() < 0.3:
                frames = [packed(call(rng, values))]
            else:
                frames = [packed(values.struct(rng.choice(KINDS)))]
            await push(socket, mutated(frames, rng) if rng.random() < 0.3 else frames)
        return await answered(socket) if rng.random() < 0.5 else said or "left"


def call(rng: random.Random, values: Values) -> dict[str, Any]:
    """A call by name, with any arguments."""
    names = [name for name in CALLS if name not in LEFT_OUT]
    method = rng.choice([*names, "collective_rpc", "nowhere", "__init__", values.text()[:100]])
    arguments: list[Any] = [values.anything() for _ in range(rng.randrange(4))]
    if method == "collective_rpc" and rng.random() < 0.8:
        inner = rng.choice(
            ("ping", "memory", "model_info", "nowhere", "__class__", "load", values.text()[:50])
        )
        arguments = [
            inner,
            rng.choice(([], [1], values.anything())),
            rng.choice(({}, {"a": 1}, values.anything())),
        ]
    keywords = {values.text()[:50]: values.anything()} if rng.random() < 0.2 else {}
    return {
        "type": "call",
        "call_id": rng.choice((1, 2, -1, 2**63 - 1)),
        "method": method,
        "args": arguments,
        "kwargs": keywords,
    }


def packed(value: Any) -> bytes:
    """A value in msgpack; empty if it cannot be."""
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""


def mutated(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """A message with a few bytes changed, cut, with frames too many, or with nothing in it."""
    first = bytearray(frames[0] or b"\0")
    for _ in range(rng.randint(1, 8)):
        first[rng.randrange(len(first))] = rng.randrange(256)
    size = log_uniform(rng, 1, 1 << 20)
    return rng.choice(
        (
            [bytes(first)],
            [bytes(first[: rng.randrange(len(first) + 1)])],
            [bytes(first), *[b"x"] * log_uniform(rng, 1, 6000)],
            [rng.randbytes(min(size, 1 << 16))],
            [b"\x91" * min(size, 1 << 18)],  # arrays of arrays
            [b"\x81\xa4type" * min(size, 1 << 17)],
            [b"\xdd\xff\xff\xff\xff" + bytes(100)],  # an array of 4 billion items, it says
            [b"\xdf\xff\xff\xff\xff" + bytes(100)],
            [b"\xc6\xff\xff\xff\xff" + bytes(100)],
            [b"", *frames],
            [b""],
        )
    )


def request(rng: random.Random, key: int, **fields: Any) -> list[Any]:
    """A request as it stands in a `Submit`: it is one that the core accepts."""
    prompt: list[Any] = [[300 + rng.randrange(100)] * rng.choice((1, 3, 40))]
    task = {"type": "sampling", "max_tokens": rng.choice((1, 4, 500)), **fields}
    return [key, f"siege-{key}", prompt, task, rng.randrange(1 << 40)]


async def submits(target: Target, rng: random.Random) -> str:
    """Requests that are right but for something: keys used twice, many at once, odd tokens, no reader."""
    reads = rng.random() < 0.5
    with dealer(target, rng, high_water=1000 if reads else 1) as socket:
        await attach(socket, rng)
        if not reads and rng.random() < 0.5:  # the core's queue is then full, and it keeps what comes after
            for number in range(FILLING):
                if not await push(socket, [packed({"type": "call", "call_id": number, "method": "metrics"})]):
                    return "full"
        for _ in range(rng.randint(1, 8)):
            fields: dict[str, Any] = {"n": rng.choice((1, 1, 2, 64)), "logprobs": rng.choice((0, 1, 5, 20))}
            if rng.random() < 0.3:
                fields["logit_bias"] = dict.fromkeys(range(log_uniform(rng, 1, 4096)), 1.0)
            keys = [rng.randrange(1, 5) for _ in range(log_uniform(rng, 1, 300))]
            batch = [request(rng, key, **fields) for key in keys]
            if rng.random() < 0.3:
                batch[0][2] = [
                    [rng.choice((-1, 2**31, 2**62, 0, 4095, 4096)) for _ in range(log_uniform(rng, 1, 3000))]
                ]
            if not await push(socket, [packed({"type": "submit", "requests": batch})]) and not reads:
                return "full"
        if not reads:
            await asyncio.sleep(rng.random() * STAY_SECONDS)
            return "left"
        return await answered(socket)


async def integers(target: Target, rng: random.Random) -> str:
    """Messages of very many integers, which cost more to decode than to send."""
    count = log_uniform(rng, 1000, 4_000_000)
    with dealer(target, rng) as socket:
        await attach(socket, rng)
        keys = b"\xdd" + count.to_bytes(4, "big") + b"\x01" * count
        where = rng.choice(
            (b"\x82\xa4type\xa5abort\xa4keys", b"\x84\xa4type\xa4call\xa7call_id\x01\xa6method\xa1x\xa4args")
        )
        await push(socket, [where + keys])
        return await answered(socket)


async def shapes(target: Target, rng: random.Random) -> str:
    """A tensor of very many dimensions, or very many tensors: from a frontend with all rights, or that may read."""
    size = log_uniform(rng, 1000, 2_000_000)
    tensor = ["float32", [rng.choice((1, 127, 2**62))] * size, b""]
    if rng.random() < 0.2:
        tensor = ["float32", [1], b"abcd"]
    media = [[0, 1, b"", tensor, True]] * (1 if len(tensor[1]) > 1 else 1024)
    batch = [[key, "siege", [[1, 5], media], {"type": "sampling"}, 1] for key in range(rng.choice((1, 50)))]
    with dealer(target, rng, name=rng.choice(("attacker", "reader"))) as socket:
        await attach(socket, rng)
        await push(socket, [packed({"type": "submit", "requests": batch[: 1 if size > 10_000 else None]})])
        return await answered(socket)


async def flood(target: Target, rng: random.Random) -> str:
    """Send thousands of small messages of one kind, and do not read the answers."""
    with dealer(target, rng, high_water=1) as socket:
        await attach(socket, rng)
        message = rng.choice(
            (
                hello(rng),
                packed({"type": "ping"}),
                packed({"type": "call", "call_id": 1, "method": "requests"}),
                packed({"type": "call", "call_id": 1, "method": "metrics"}),
                packed({"type": "submit", "requests": [request(rng, 1, n=64, max_tokens=1)]}),
                packed(
                    {"type": "submit", "requests": [[1, "x" * 1000, [[]], {"type": "sampling"}, 1]] * 200}
                ),
                packed({"type": "abort", "keys": list(range(1000))}),
                b"\xc1",
            )
        )
        for _ in range(log_uniform(rng, 100, 5000)):
            try:
                await socket.send(message, zmq.NOBLOCK)
            except zmq.ZMQError:
                await asyncio.sleep(0.001)
        await asyncio.sleep(rng.random() * STAY_SECONDS)
    return "left"


async def hellos(target: Target, rng: random.Random) -> str:
    """Very many frontends that greet and do no more."""
    statuses = set()
    for _ in range(rng.randint(1, 60)):
        with dealer(target, rng) as socket:
            if rng.random() < 0.8:
                await socket.send(hello(rng))
            else:
                odd = {
                    "type": "hello",
                    "protocol": rng.choice((0, 1, 99, -1)),
                    "version": "x" * 1000,
                    "pid": 2**60,
                }
                await socket.send(packed(odd))
            if rng.random() < 0.2:
                statuses.add(await answered(socket))
    return "+".join(sorted(statuses)) or "left"


async def sockets(target: Target, rng: random.Random) -> str:
    """Bytes that are not ZeroMQ's protocol: none, half a greeting, a frame of 2^63 bytes."""
    assert target.address is not None
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    ready = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    data = rng.choice(
        (
            b"",
            greeting[: rng.randrange(64)],
            greeting,
            greeting + ready + b"\x02" + (1 << 63).to_bytes(8, "big") + bytes(100),
            greeting + ready + b"\x02" + (250 << 20).to_bytes(8, "big") + bytes(1 << 16),
            greeting + ready + b"\x01\x01x" * log_uniform(rng, 1, 100_000),
            greeting.replace(b"NULL", b"PLAI") + ready,
            rng.randbytes(log_uniform(rng, 1, 1 << 16)),
            b"GET / HTTP/1.1\r\n\r\n",
        )
    )
    writers = []
    kind, _, place = target.address.partition("://")
    host, _, port = place.rpartition(":")
    for _ in range(rng.randint(1, 40)):
        try:
            opening = (
                asyncio.open_unix_connection(place) if kind == "ipc" else asyncio.open_connection(host, port)
            )
            _, writer = await opening
        except OSError:
            break
        writers.append(writer)
        writer.write(data)
    await asyncio.sleep(rng.random() * STAY_SECONDS)
    for writer in writers:
        writer.transport.abort()
    return "held" if writers else "refused"
