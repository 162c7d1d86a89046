"""Routes that know what they take and give, and the OpenAPI document made of them."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route


class Operation(Route):
    """A route of one method, described.

    endpoint: a function (request) -> response, or an ASGI application.
    body, result: structs of the request's and the answer's JSON. streams: of a streamed answer's events.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Any,
        summary: str,
        *,
        body: Any = None,
        result: Any = None,
        streams: Any = None,
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method, self.summary = method, summary
        self.body, self.result, self.streams = body, result, streams
