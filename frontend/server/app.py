"""The server as an ASGI application: middleware and routes.

request id --> count --> Host and Origin --> CORS --> API key --> the user's middleware --> routes

It knows no API: `wiring.py` chooses those that it serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route, WebSocketRoute

from pagewire.frontend.server.http import openapi
from pagewire.frontend.server.http.body import LARGE_BODIES, IncomingBodies
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import on_error, on_http_error
from pagewire.frontend.server.http.middleware import middleware
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.traffic import Traffic
from pagewire.frontend.server.serving.answer_memory import AnswerMemory
from pagewire.frontend.server.serving.service import Services
from pagewire.ipc.errors import EngineBusyError, EngineDeadError
from pagewire.ipc.wire.budget import MAX_OPEN_POOLED_BYTES

# Exceptions that become error responses. Plain `Exception` is re-raised after that, and logged with its traceback.
HANDLED = (
    APIError,
    EngineDeadError,
    EngineBusyError,
    ValueError,
    TypeError,
    msgspec.MsgspecError,
    Exception,
)


def open_app(
    services: Services,
    operations: Sequence[Operation],
    sockets: Sequence[WebSocketRoute] = (),
    files: Sequence[Route] = (),
    hidden: Mapping[str, str] | None = None,
) -> Starlette:
    """Return the application that serves models.

    operations: of all APIs. sockets: routes of WebSockets, which an OpenAPI document cannot have. files: routes of
    files, which need no key, and are not in the OpenAPI document either. hidden: by paths that are served only
    with an option, that option.

    Raises:
        ValueError, TypeError: a middleware cannot be imported.
    """
    options = services.options
    routes = [*operations, openapi.document_route(operations, options)]
    app = Starlette(
        routes=[*routes, *sockets, *files],
        middleware=middleware(options, {route.path for route in files}, priorities=services.by_priority),
        exception_handlers={HTTPException: on_http_error, **dict.fromkeys(HANDLED, on_error)},
    )
    app.router.redirect_slashes = False  # a path with an additional slash is an unknown path
    app.state.service = services
    served_paths = {route.path for route in routes}
    app.state.hidden_paths = {path: name for path, name in (hidden or {}).items() if path not in served_paths}
    app.state.traffic = Traffic()
    app.state.answer_memory = AnswerMemory(MAX_OPEN_POOLED_BYTES)
    app.state.incoming_bodies = IncomingBodies(LARGE_BODIES * options.max_request_bytes)
    return app
