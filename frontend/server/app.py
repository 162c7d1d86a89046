"""The server as an ASGI application: endpoints, and what stands before them.

CORS --> keys --> the user's middleware --> routes
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.frontend.async_llm import AsyncLLM
from pagewire.frontend.server import chat, completions, models, monitoring
from pagewire.frontend.server.auth import KeyCheck
from pagewire.frontend.server.errors import APIError
from pagewire.frontend.server.openapi import Operation
from pagewire.frontend.server.options import ServerOptions
from pagewire.frontend.server.responding import on_error, on_http_error
from pagewire.frontend.server.service import Service
from pagewire.ipc.errors import EngineBusyError, EngineDeadError

# Exceptions with an answer; Exception itself is answered, too, and logged with its traceback.
TOLD = (APIError, EngineDeadError, EngineBusyError, ValueError, TypeError, msgspec.MsgspecError, Exception)
FAMILIES = (completions, chat, models, monitoring)


def create_app(engine: AsyncLLM, options: ServerOptions | None = None) -> Starlette:
    """The application. The engine is the caller's: it is not shut down with the application.

    Raises:
        ValueError: bad options, or a middleware that cannot be imported.
    """
    options = options or ServerOptions()
    options.check()
    service = Service(engine, options)
    routes: list[Operation] = [route for family in FAMILIES for route in family.routes(service)]
    app = Starlette(
        routes=routes,
        middleware=middleware(options),
        exception_handlers={HTTPException: on_http_error, **dict.fromkeys(TOLD, on_error)},
    )
    app.router.redirect_slashes = False  # a path with a slash too many is another path
    app.state.service = service
    return app


def middleware(options: ServerOptions) -> list[Middleware]:
    """What a request passes, from the outside in."""
    found = [
        Middleware(RootPath, root_path=options.root_path),
        Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
        ),
    ]
    if keys := options.keys():
        found.append(Middleware(KeyCheck, keys=keys, root_path=options.root_path))
    return found + [imported(path) for path in options.middleware]


def imported(path: str) -> Middleware:
    """The user's middleware: an ASGI class, or a function (request, call_next).

    Raises:
        ValueError: there is no such thing.
    """
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no middleware {path!r}: {error}") from error
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    if callable(found):
        return Middleware(found)
    raise ValueError(f"middleware {path!r} is neither a class nor an async function")


class RootPath:
    """ASGI middleware: a path may, or may not, begin with the prefix that a proxy serves us under."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app, self._root_path = app, root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the routes of the prefix."""
        if self._root_path:
            scope = {**scope, "root_path": self._root_path}
        await self.app(scope, receive, send)
