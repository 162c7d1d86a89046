"""A server that speaks enough of OpenAI's API to be measured, on a thread of its own. It keeps what it was sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

KEY = "secret"


class FakeServer:
    """Answers every request with `max_tokens` words, in chunks cut at odd places.

    gather: requests wait until this many have come. misbehave: by number of request, how it goes wrong.
    """

    def __init__(self, gather: int = 1, misbehave: dict[int, str] | None = None) -> None:
        self.gather, self.misbehave = gather, misbehave or {}
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.arrival = asyncio.Condition()
        self.profiled: list[tuple[str, int]] = []  # paths, and how many requests had come

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        for path in ("/start_profile", "/stop_profile"):
            app.router.add_post(path, self.profile)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        return app

    async def models(self, request: web.Request) -> web.Response:
        """One model."""
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        """A token per character."""
        return web.json_response({"tokens": [ord(c) for c in (await request.json())["prompt"]]})

    async def detokenize(self, request: web.Request) -> web.Response:
        """A character per token."""
        return web.json_response({"prompt": "".join(map(chr, (await request.json())["tokens"]))})

    async def profile(self, request: web.Request) -> web.Response:
        """Note it, if an operator asks."""
        if request.headers.get("X-Pagewire-Admin") != "1":
            return web.json_response({"error": {"message": "not an operator"}}, status=403)
        self.profiled.append((request.path, len(self.bodies)))
        return web.json_response({"profiling": request.path == "/start_profile"})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream one answer."""
        number = len(self.bodies)
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        async with self.arrival:
            self.arrival.notify_all()
            await self.arrival.wait_for(lambda: len(self.bodies) >= min(self.gather, number + self.gather))
        try:
            return await self.answer(request, body, self.misbehave.get(number, ""))
        finally:
            self.running -= 1

    async def answer(self, request: web.Request, body: dict[str, Any], wrong: str) -> web.StreamResponse:
        """Events of one word each; two of every three bytes go out first."""
        if wrong == "busy":
            return web.json_response({"error": {"message": "try\nlater"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index, event in enumerate(self.events(body)):
            if wrong and index == 2:
                event = {"error": b'{"error": {"message": "lost the core"}}', "garbage": b"{]"}.get(
                    wrong, b""
                )
                if not event:
                    return response
            data = b"data: " + event + b"\n\n"
            cut = 2 * len(data) // 3
            await response.write(data[:cut])
            await response.write(data[cut:])
        return response

    def events(self, body: dict[str, Any]) -> Iterator[bytes]:
        """What is streamed."""
        count, chat = body["max_tokens"], "messages" in body
        usage = {"prompt_tokens": len(prompt_of(body)), "completion_tokens": count}
        for index in range(-1, count):
            text = "" if index < 0 else f" w{index}"
            choice = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
            yield json.dumps({"id": "x", "choices": [{"index": 0, **choice}]}).encode()
        yield json.dumps({"id": "x", "choices": [], "usage": usage}).encode()
        yield b"[DONE]"


def prompt_of(body: dict[str, Any]) -> Any:
    """Text or token ids."""
    return body["messages"][0]["content"] if "messages" in body else body["prompt"]


@contextmanager
def fake_server(server: FakeServer, uds: str | None = None) -> Iterator[int]:
    """Its port, while it runs; or 0 on a unix socket."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(server.app(), shutdown_timeout=1.0, handler_cancellation=True)
        await runner.setup()
        if uds:
            await web.UnixSite(runner, uds).start()
            return runner, 0
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
