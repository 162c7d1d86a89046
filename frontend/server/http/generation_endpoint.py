"""One request for generation, from its body to its line in the log.

body --> checked struct --> answer(...) --> JSON, or events as they come
                               ^ cancelled when the client leaves or the deadline passes
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pagewire.frontend.server.http.body import Decoder, read_body
from pagewire.frontend.server.http.errors import APIError, api_error
from pagewire.frontend.server.http.exchange import Exchange
from pagewire.frontend.server.http.response import HttpResponse
from pagewire.frontend.server.service import Service
from pagewire.ipc.errors import RequestError

logger = logging.getLogger("pagewire.server")

T = TypeVar("T")
Events = AsyncGenerator[bytes, None]


class GenerationEndpoint(Generic[T]):
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
        reply = HttpResponse(send)
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

    async def _serve(self, request: T, exchange: Exchange, reply: HttpResponse) -> None:
        answer = await self.answer(self.service, request, exchange)
        if isinstance(answer, bytes):
            await reply.send_json(200, answer)
            return
        async with aclosing(answer) as events:
            async for event in events:
                await reply.stream(event)
        await reply.end()


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
