"""Pictures and sounds that are bombs, broken, numerous, or at URLs that nobody should fetch."""

from __future__ import annotations

import asyncio
import base64
import random
from functools import cache
from typing import Any

from .attack import Target, log_uniform, post
from .media_files import BOMBS, plain_png, wav

PRIVATE = ("127.0.0.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1")
WEB_HOST = "127.0.0.1"  # of the server that `web_port` starts; the siege lets its server fetch from there
CHAT = "/v1/chat/completions"
SLOW = ("jpeg of many scans", "jpeg of many scans", "flac without end")
HEAD = b"HTTP/1.1 200 OK\r\n"


async def attack(target: Target, rng: random.Random) -> str:
    """One chat with pictures or sounds."""
    parts = await rng.choice((bomb, damaged, numerous, remote, remote, plain))(target, rng)
    return await ask_about(target, rng, parts, rng.choice((CHAT, "/tokenize")))


async def sizes(target: Target, rng: random.Random) -> str:
    """A picture of many pixels and of a size never seen, for which the model's processor is asked anew."""
    width, height = (rng.randint(2000, 4000) for _ in range(2))
    data = await asyncio.to_thread(plain_png, width, height)
    return await ask_about(target, rng, [part("image", data)], CHAT)


async def padding(target: Target, rng: random.Random) -> str:
    """A small picture, whose processor is to fill its layout up to millions of tokens, in ever new words."""
    more = {"padding": "max_length", "max_length": log_uniform(rng, 1000, 4_000_000)}
    parts = [part("image", plain_png(rng.randint(1, 99), rng.randint(1, 99)))]
    return await ask_about(target, rng, parts, CHAT, mm_processor_kwargs=more)


async def slow(target: Target, rng: random.Random) -> str:
    """A file that takes a decoder as long as it may, and never the same."""
    kind, data = await asyncio.to_thread(made, rng.choice(SLOW))
    return await ask_about(target, rng, [part(kind, data + rng.randbytes(8))], CHAT)


async def ask_about(target: Target, rng: random.Random, parts: list[Any], path: str, **more: Any) -> str:
    """Send a chat of one message; as `post`."""
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **more}
    fields["model"] = target.pictures or target.model
    return await post(target, rng, path, fields)


def part(kind: str, data: bytes | str) -> dict[str, Any]:
    """A part of a message. data: of a file, or a URL."""
    url = data if isinstance(data, str) else f"data:;base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


@cache
def made(name: str) -> tuple[str, bytes]:
    """A bomb, made once."""
    kind, make = BOMBS[name]
    return kind, make()


async def bomb(target: Target, rng: random.Random) -> list[Any]:
    """A file that is larger than it looks."""
    return [part(*await asyncio.to_thread(made, rng.choice(list(BOMBS))))]


async def damaged(target: Target, rng: random.Random) -> list[Any]:
    """A small file with wrong bytes, or cut."""
    kind, data = rng.choice(
        (("image", plain_png(300, 200)), ("audio", wav(4000)), made("jpeg of many scans"))
    )
    broken = bytearray(data)
    for _ in range(rng.choice((1, 10, 100))):
        broken[rng.randrange(len(broken))] = rng.randrange(256)
    return [part(kind, bytes(broken[: rng.randint(1, len(broken))]))]


async def numerous(target: Target, rng: random.Random) -> list[Any]:
    """Many tiny pictures."""
    return [part("image", plain_png(1, 1))] * log_uniform(rng, 1, 10_000)


async def plain(target: Target, rng: random.Random) -> list[Any]:
    """A picture that is one."""
    size = log_uniform(rng, 1, 2000)
    return [part("image", plain_png(size, size, (rng.randrange(256), 0, 0))), {"type": "text", "text": "a"}]


async def remote(target: Target, rng: random.Random) -> list[Any]:
    """A URL of a host that answers badly, or of one that is not to be reached."""
    web = f"http://{WEB_HOST}:{await web_port()}"
    urls = [f"{web}/{name}" for name in ("endless", "slow", "silent", "loop", "nonsense", "png")]
    private = f"http://{rng.choice(PRIVATE[1:])}:{target.port}/v1/models"
    urls += [private, f"{web}/redirect?{private}", "file:///etc/passwd", "file:///dev/zero", "gopher://a/"]
    return [part(rng.choice(("image", "audio")), rng.choice(urls))]


_ports: dict[asyncio.AbstractEventLoop, asyncio.Task[int]] = {}


async def web_port() -> int:
    """The port of an HTTP server in this process that answers badly; the first call starts it."""
    loop = asyncio.get_running_loop()
    if loop not in _ports:
        _ports[loop] = loop.create_task(start_web())
    return await _ports[loop]


async def start_web() -> int:
    """Start that server; its port."""
    server = await asyncio.start_server(serve, WEB_HOST, 0)
    return int(server.sockets[0].getsockname()[1])


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request, or do not."""
    try:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        name, _, rest = target[1:].partition("?")
        if name == "png":
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(plain_png(9, 9)) + plain_png(9, 9))
        elif name in ("loop", "redirect"):
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: {rest or '/loop'}\r\n\r\n".encode())
        elif name == "nonsense":
            writer.write(b"\0" * 10_000)
        else:
            writer.write(HEAD + b"\r\n")
            while name != "silent" or not await reader.read(1):
                writer.write(bytes(1 << 16) if name == "endless" else b"x")
                await asyncio.sleep(0 if name == "endless" else 1)
                await writer.drain()
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.close()
