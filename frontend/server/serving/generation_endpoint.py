"""Handling of a generation request, from its body to its log line.

body --> checked struct --> answer(...) --> JSON, whole or in parts, text, or a stream of events
                               ^ cancelled when the client disconnects or the deadline passes
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pagewire.frontend.server.http.api_shapes import api_shape
from pagewire.frontend.server.http.body import BodyDecoder, Decoder
from pagewire.frontend.server.http.errors import APIError, FieldNames, api_error
from pagewire.frontend.server.http.response import HttpResponse
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.ipc.errors import RequestError
from pagewire.ipc.quoting import quoted

logger = logging.getLogger("pagewire.server")

T = TypeVar("T")
Events = AsyncGenerator[bytes, None]


class GenerationEndpoint(Generic[T]):
    """An ASGI application that handles generation requests of one type.

    kind: a struct for JSON, or what reads other bodies.
    answer: returns the JSON of the response, whole or in parts, plain text, or the encoded events of a stream.
    prefix: prefix of request ids. names: of the API's fields, see `FieldNames`.
    """

    def __init__(
        self,
        services: Services,
        prefix: str,
        kind: type[T] | BodyDecoder[T],
        answer: Callable[[Service, T, Exchange], Awaitable[bytes | str | Iterator[bytes] | Events]],
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.services, self.prefix, self.answer = services, prefix, answer
        self.decoder: BodyDecoder[T] = Decoder(kind) if isinstance(kind, type) else kind
        self._names = FieldNames(names, self.decoder.fields)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        exchange = Exchange(self.prefix, scope)
        shape = api_shape(scope)
        response = HttpResponse(send, shape)
        status, why = 200, None
        self.services.open[exchange.id] = exchange
        try:
            exchange.lease.begin()
            request = await self.decoder.read(scope, receive, self.services.options)
            exchange.body_decoded()
            self._name(exchange, request)
            seconds = deadline(request, exchange.headers)
            await exchange.run(self._use(request, exchange, response), receive, seconds)
        except (Exception, asyncio.CancelledError) as error:
            reported = self._reported(error, exchange)
            status, why = shape.status(reported), reported.message
            await response.fail(reported)
        finally:
            del self.services.open[exchange.id]
            exchange.end()
            if not self.services.options.disable_log_requests:
                exchange.log(status, why, self.services.options.max_log_len)

    def _name(self, exchange: Exchange, request: T) -> None:
        """Take over a request's `user`, and its `request_id` if there is no header X-Request-Id."""
        exchange.user = getattr(request, "user", None) or getattr(request, "safety_identifier", None)
        name = getattr(request, "request_id", None)
        if name and not exchange.client_id:
            del self.services.open[exchange.id]
            exchange.use_name(name)
            self.services.open[exchange.id] = exchange

    def _reported(self, error: BaseException, exchange: Exchange) -> APIError:
        """Map an exception to an APIError; log it with its traceback if it is a server error."""
        if isinstance(
            error, asyncio.CancelledError
        ):  # uvicorn cancels requests when `drain_seconds` have passed
            return APIError(503, "the server is shutting down", code="shutting_down")
        reported = api_error(error, self._names)
        if reported.status == 500 and not isinstance(error, RequestError):
            logger.error("request %s failed", exchange.id, exc_info=error)
        return reported

    async def _use(self, request: T, exchange: Exchange, response: HttpResponse) -> None:
        """Answer a request by the model that it names, once that is loaded."""
        model, keep_alive = getattr(request, "model", None), getattr(request, "keep_alive", None)
        async with self.services.use(model, keep_alive) as service:
            exchange.tenant.apply(request, by_priority=service.info.by_priority)
            await self._serve(service, request, exchange, response)

    async def _serve(self, service: Service, request: T, exchange: Exchange, response: HttpResponse) -> None:
        answer = await self.answer(service, request, exchange)
        if isinstance(answer, bytes):
            await response.send_json(200, answer, {"Server-Timing": exchange.server_timing()})
            return
        if isinstance(answer, str):
            await response.send_text(answer, {"Server-Timing": exchange.server_timing()})
            return
        if isinstance(answer, Iterator):
            await response.send_parts(answer, {"Server-Timing": exchange.server_timing()})
            return
        async with aclosing(answer) as events:
            async for event in events:
                if not response.streaming:
                    await response.begin_stream({"Server-Timing": exchange.server_timing()})
                await response.stream(event)
        await response.end()


def deadline(request: Any, headers: Headers) -> float | None:
    """Return the seconds that a request may take: its field `timeout`, else the header X-Request-Timeout.

    Raises:
        APIError: the value is not a number over 0.
    """
    given = getattr(request, "timeout", None)
    if given is None:
        given = headers.get("x-request-timeout")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise APIError(
            400, f"timeout must be a number of seconds over 0, got {quoted(given)}", param="timeout"
        )
    return seconds
