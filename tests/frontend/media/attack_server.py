"""An HTTP server on loopback that does what no server should."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import unquote

CONTENT = b"content"


class AttackServer:
    """Runs in a thread of its own. seen: requests by path. Its addresses are those of loopback."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.port = 0
        self.contents: dict[str, bytes] = {"/ok": CONTENT}
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait(20)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        """The URL of a path here."""
        return f"http://{host}:{self.port}{path}"

    def close(self) -> None:
        """End the server."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "0.0.0.0", 0))
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            target = head.split()[1].decode()
            path, _, rest = target.partition("?")
            self.seen[path] += 1
            await self._answers().get(path, self._content)(writer, unquote(rest) or path)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _answers(self) -> dict[str, Callable[[asyncio.StreamWriter, str], Coroutine[Any, Any, None]]]:
        return {
            "/redirect": self._redirect,
            "/endless": self._endless,
            "/slow": self._slow,
            "/silent": self._silent,
            "/compressed": self._compressed,
            "/nonsense": self._nonsense,
        }

    async def _content(self, writer: asyncio.StreamWriter, path: str) -> None:
        data = self.contents.get(path)
        if data is None:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\nsecret")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        await writer.drain()

    async def _redirect(self, writer: asyncio.StreamWriter, to: str) -> None:
        place = {"loop": self.url("/redirect?loop"), "nowhere": ""}.get(to, to)
        writer.write(f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()

    async def _endless(self, writer: asyncio.StreamWriter, _: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            await writer.drain()

    async def _slow(self, writer: asyncio.StreamWriter, _: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(1)

    async def _silent(self, writer: asyncio.StreamWriter, _: str) -> None:
        await asyncio.sleep(3600)

    async def _compressed(self, writer: asyncio.StreamWriter, _: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc")
        await writer.drain()

    async def _nonsense(self, writer: asyncio.StreamWriter, _: str) -> None:
        writer.write(b"SSH-2.0-secret banner\r\n\r\n")
        await writer.drain()
