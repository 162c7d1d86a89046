"""Counts and times of the server's own requests, by endpoint, under the names that dashboards of FastAPI have.

They are those of this server alone; another one on the same core has its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.ipc.distribution import Distribution

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
METHODS = (
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "DELETE",
    "OPTIONS",
    "PATCH",
)  # others are one: clients can invent any
NO_HANDLER, OTHER = "none", "other"
LEFT = 499  # status of a request whose client left before any
STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
ACCEPTED = 101  # status of what opens a WebSocket, which counts until that ends


class Traffic:
    """The requests that a server has answered.

    A handler is the path of a route, such as /v1/models/{model}. "none": no route, or a refusal before it.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, str], int] = {}  # by handler, method, and status such as "2xx"
        self._seconds: dict[tuple[str, str], Distribution] = {}  # by handler and method

    def add(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        method = method if method in METHODS else OTHER
        number = (handler, method, f"{status // 100}xx")
        self._numbers[number] = self._numbers.get(number, 0) + 1
        if (handler, method) not in self._seconds:
            self._seconds[handler, method] = Distribution(SECONDS)
        self._seconds[handler, method].observe(seconds)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics, in the form of the core's."""
        for (handler, method, status), number in self._numbers.items():
            yield {
                "name": "http_requests_total",
                "type": "counter",
                "documentation": "HTTP requests of this server, by path, method and class of status.",
                "labels": {"handler": handler, "method": method, "status": status},
                "value": number,
            }
        for (handler, method), distribution in self._seconds.items():
            yield {
                "name": "http_request_duration_seconds",
                "type": "histogram",
                "documentation": "Time from the head of an HTTP request to the end of its response.",
                "labels": {"handler": handler, "method": method},
                **distribution.values(),
            }


class TrafficCount:
    """ASGI middleware that counts requests in the application's `state.traffic`.

    The route of a request adds its path to the list `handlers` of the scope; later middleware may copy the scope,
    which still has the same list.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count it when it has ended."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        status, began, handlers = LEFT, time.perf_counter(), [NO_HANDLER]

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] in STARTS:
                status = message.get("status", ACCEPTED)
            await send(message)

        try:
            await self.app({**scope, "handlers": handlers}, receive, send_counted)
        finally:
            traffic: Traffic = scope["app"].state.traffic
            traffic.add(handlers[-1], scope.get("method", "GET"), status, time.perf_counter() - began)
