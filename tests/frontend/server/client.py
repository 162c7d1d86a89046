"""A client that calls the application in this process, and may do what no library lets one do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.wiring import create_app

T = TypeVar("T")

PATIENCE = 20.0


@dataclass
class Answer:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must have OpenAI's shape."""
        (name,) = self.json
        assert name == "error" and set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]  # type: ignore[no-any-return]

    @property
    def events(self) -> list[Any]:
        """What a stream told, which must end as streams do."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done, nothing = self.body.decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


class Call:
    """One request that runs. Its response comes in by and by; the client may hang up.

    parts: of the body, in order. ends: else, more is promised, and never comes.
    """

    def __init__(self, app: Any, scope: dict[str, Any], parts: list[bytes], ends: bool) -> None:
        self._parts, self._ends = parts, ends
        self._gone = asyncio.Event()
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return {
                "type": "http.request",
                "body": self._parts.pop(0),
                "more_body": bool(self._parts) or not self._ends,
            }
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self._gone.is_set():
            self._sent.put_nowait(message)

    def hang_up(self) -> None:
        """Leave."""
        self._gone.set()

    async def message(self) -> dict[str, Any]:
        """The next message of the response."""
        return await asyncio.wait_for(self._sent.get(), PATIENCE)

    async def answer(self, start: dict[str, Any] | None = None) -> Answer:
        """All of the response. start: its first message, if that was taken before."""
        start = start or await self.message()
        body, more = b"", True
        while more:
            part = await self.message()
            body += part.get("body", b"")
            more = part.get("more_body", False)
        await asyncio.wait((self.task,), timeout=PATIENCE)  # it raises what the HTTP server is to log
        assert self.task.done()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
        return Answer(start["status"], headers, body)


class Client:
    """Calls one application on one engine."""

    def __init__(self, engine: AsyncLLM, others: Sequence[AsyncLLM] = (), **options: Any) -> None:
        self.engine = engine
        self.app = create_app(engine, ServerOptions(**options), others)

    def call(
        self,
        method: str,
        target: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        ends: bool = True,
    ) -> Call:
        """Begin a request. body: of JSON, bytes, or parts of bytes that arrive one by one; `ends`: all of it."""
        path, _, query = target.partition("?")
        named = {"host": "localhost"} | ({} if body is None else {"content-type": "application/json"})
        named |= {name.lower(): value for name, value in (headers or {}).items()}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("localhost", 80),
            "root_path": "",
        }
        parts = body if isinstance(body, list) and body and isinstance(body[0], bytes) else None
        if parts is None:
            parts = [body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()]
        return Call(self.app, scope, parts, ends)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a test's own client."""
        return asyncio.run(work())

    def request(
        self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """A request from its beginning to its end."""

        async def whole() -> Answer:
            return await self.call(method, target, body, headers).answer()

        return self.run(whole)

    def get(self, target: str, **headers: str) -> Answer:
        """GET."""
        return self.request("GET", target, headers=headers)

    def post(self, target: str, body: Any = None, **headers: str) -> Answer:
        """POST."""
        return self.request("POST", target, body, headers)
