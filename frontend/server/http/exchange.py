"""One request for generation, from its body to its line in the log.

body --> checked struct --> answer(...) --> JSON, or events as they come
                               ^ cancelled when the client leaves or the deadline passes
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pagewire.frontend.outputs import RequestOutput
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.body import ClientLeftError, Decoder, read_body
from pagewire.frontend.server.http.errors import APIError, api_error
from pagewire.frontend.server.openai.protocol import PromptTokensDetails, Usage
from pagewire.frontend.server.service import Service
from pagewire.ipc.errors import RequestError

logger = logging.getLogger("pagewire.server")

T = TypeVar("T")
Header = tuple[bytes, bytes]

JSON_HEADERS: list[Header] = [(b"content-type", b"application/json")]


class Exchange:
    """What is known of a request while it is served, and afterwards in the log.

    Attributes:
        id: unique, and the engine's name for the request. given_id: what it is called in headers.
        headers: of the request. created: seconds since the epoch, when it came.
        num_prompt, num_cached, num_output: tokens. reasons: finish reasons, in order. prompt: for the log.
    """

    def __init__(self, prefix: str, scope: Scope) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.path: str = scope["path"]
        self.headers = Headers(scope=scope)
        self.given_id: str = scope["request_id"]
        self._came = time.time()
        self.created = int(self._came)
        self.num_prompt = self.num_cached = self.num_output = 0
        self.reasons: list[str] = []
        self.prompt: str | list[int] = ""
        self._stopped: asyncio.Future[APIError] = asyncio.get_running_loop().create_future()
        self._first_token: float | None = None
        self._answered: set[int] = set()

    def count(self, index: int, output: RequestOutput) -> bool:
        """Take note of an output of prompt `index` that is new (DELTA), or whole (FINAL_ONLY); true if it is the
        first one of that prompt.

        Raises:
            APIError: somebody else has ended the request.
        """
        first = index not in self._answered
        if first:
            self._answered.add(index)
            self.num_prompt += len(output.prompt_token_ids or ())
            self.num_cached += output.num_cached_tokens or 0
            if self._first_token is None and output.metrics is not None:
                self._first_token = output.metrics.first_token_time
        for completion in output.outputs:
            self.num_output += len(completion.token_ids)
            if completion.finish_reason is not None:
                self.reasons.append(completion.finish_reason)
        check_aborted(output)
        return first

    async def run(self, work: Coroutine[Any, Any, None], receive: Receive, seconds: float | None) -> None:
        """Run `work` to its end; otherwise it is cancelled, and has cleaned up, before this raises.

        Raises:
            APIError: the client hung up, it took longer than `seconds`, or was stopped.
            And what `work` raises.
        """
        task = asyncio.ensure_future(work)
        left = asyncio.ensure_future(disconnection(receive))
        try:
            await asyncio.wait((task, left, self._stopped), timeout=seconds, return_when=FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            left.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        if self._stopped.done():
            raise self._stopped.result()
        if left.done() and not left.cancelled():
            raise ClientLeftError
        raise APIError(408, f"the request took longer than {seconds:g} s", code="deadline_passed")

    def stop(self, error: APIError) -> None:
        """End it with an error. May be called when it has ended."""
        if not self._stopped.done():
            self._stopped.set_result(error)

    def usage(self) -> Usage:
        """Token counts as of now."""
        total = self.num_prompt + self.num_output
        return Usage(self.num_prompt, self.num_output, total, PromptTokensDetails(self.num_cached))

    def log(self, status: int, why: str | None, max_log_len: int) -> None:
        """Its one line. why: what went wrong. max_log_len: so much of the prompt; -1: all."""
        first = self._first_token
        facts = {
            "id": self.id,
            "request_id": self.given_id,
            "path": self.path,
            "status": status,
            "tokens_in": self.num_prompt,
            "tokens_cached": self.num_cached,
            "tokens_out": self.num_output,
            "ttft_ms": None if first is None else round(1e3 * (first - self._came), 1),
            "seconds": round(time.time() - self._came, 3),
            "finish": ",".join(self.reasons) or None,
            "error": why,
            "prompt": self.prompt[: None if max_log_len < 0 else max_log_len] or None,
        }
        told = {name: value for name, value in facts.items() if value is not None}
        line = " ".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in told.items())
        logger.info("%s", line, extra={"facts": told})


Events = AsyncGenerator[bytes, None]


class Generation(Generic[T]):
    """An endpoint that generates: an ASGI application that answers requests of one type.

    answer: makes of a request the JSON of its answer, or the events of a stream. prefix: of the ids.
    """

    def __init__(
        self,
        service: Service,
        prefix: str,
        kind: type[T],
        answer: Callable[[Service, T, Exchange], Awaitable[bytes | Events]],
    ) -> None:
        self.service, self.prefix, self.answer = service, prefix, answer
        self.decoder = Decoder(kind)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = Exchange(self.prefix, scope)
        reply = Reply(send)
        status, why = 200, None
        self.service.open[exchange.id] = exchange
        try:
            request = self.decoder.decode(await read_body(scope, receive, self.service.options), exchange.id)
            seconds = deadline(request, exchange.headers)
            await exchange.run(self._serve(request, exchange, reply), receive, seconds)
        except (Exception, asyncio.CancelledError) as error:
            told = self._told(error, exchange)
            status, why = told.status, told.message
            await reply.fail(told)
        finally:
            del self.service.open[exchange.id]
            if not self.service.options.disable_log_requests:
                exchange.log(status, why, self.service.options.max_log_len)

    def _told(self, error: BaseException, exchange: Exchange) -> APIError:
        """An error as the client is told of it; one that is nobody's fault but ours is logged."""
        if isinstance(error, asyncio.CancelledError):  # by the HTTP server, whose patience has an end
            return APIError(503, "the server is shutting down", code="shutting_down")
        told = api_error(error, self.decoder.fields)
        if told.status == 500 and not isinstance(error, RequestError):
            logger.error("request %s failed", exchange.id, exc_info=error)
        return told

    async def _serve(self, request: T, exchange: Exchange, reply: Reply) -> None:
        answer = await self.answer(self.service, request, exchange)
        if isinstance(answer, bytes):
            await reply.send_json(200, answer)
            return
        async with aclosing(answer) as events:
            async for event in events:
                await reply.stream(event)
        await reply.end()


class Reply:
    """The response: JSON, or events. Nothing is sent before there is something to say, so that an error that
    comes first still gets its status.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.streaming = self.complete = False

    async def stream(self, events: bytes) -> None:
        """Send events, encoded, in one write."""
        if not self.streaming:
            self.streaming = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*sse.HEADERS]})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """No more events."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_json(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a whole answer."""
        self.complete = True
        more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*JSON_HEADERS, length, *more],
            }
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: APIError) -> None:
        """Tell an error: by its status or, within a stream, by an event. After a complete answer it is too late."""
        if self.complete:
            return
        if self.streaming:
            await self.stream(b"data: " + error.encode() + b"\n\n" + sse.DONE)
            await self.end()
        else:
            await self.send_json(error.status, error.encode(), error.headers)


def deadline(request: Any, headers: Headers) -> float | None:
    """Seconds that a request may take: its field `timeout`, or else the header X-Request-Timeout.

    Raises:
        APIError: that is no number of seconds over 0.
    """
    wanted = getattr(request, "timeout", None)
    if wanted is None:
        wanted = headers.get("x-request-timeout")
    if wanted is None:
        return None
    try:
        seconds = float(wanted)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise APIError(400, f"timeout must be a number of seconds over 0, got {wanted!r}", param="timeout")
    return seconds


def check_aborted(output: RequestOutput) -> None:
    """Somebody else than the client may have ended the request: by /pause, or on the engine core.

    Raises:
        APIError: so it is.
    """
    if any(completion.finish_reason == "abort" for completion in output.outputs):
        raise APIError(499, "the request was aborted", code="aborted")


async def disconnection(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
