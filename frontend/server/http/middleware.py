"""The middleware around the routes, from the outside in:

request id --> count --> Host and Origin --> CORS --> API key --> the user's middleware

The cheap refusals come first.
"""

from __future__ import annotations

import importlib
import inspect
import re
import uuid
from collections.abc import Collection
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.frontend.server.http.api_shapes import api_shape
from pagewire.frontend.server.http.auth import ApiKeys, KeyCheck
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.origin import OriginCheck
from pagewire.frontend.server.http.traffic import STARTS, TrafficCount
from pagewire.frontend.server.http.warnings import begin_warnings

VALID_ID = re.compile(rb"[\x21-\x7e\x80-\xff][\x20-\x7e\x80-\xff]{0,255}")


def middleware(
    options: ServerOptions, files: Collection[str] = (), *, priorities: bool = False
) -> list[Middleware]:
    """Return the middleware of a server with these options, outermost first.

    files: paths of files that need no key. priorities: the engine schedules by priority.

    Raises:
        ValueError: a middleware of the user cannot be imported, or the key file is not valid.
    """
    stack = [
        Middleware(RequestId, root_path=options.root_path),
        Middleware(TrafficCount),
        Middleware(OriginCheck, options=options),
    ]
    if options.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
        )
        stack.append(cors)
    if options.keyed:
        stack.append(Middleware(KeyCheck, keys=ApiKeys(options, priorities=priorities), files=files))
    return stack + [import_middleware(path) for path in options.middleware]


def import_middleware(path: str) -> Middleware:
    """Import the user's middleware: an ASGI class, or an async function (request, call_next).

    Raises:
        ValueError: it cannot be imported, or is neither.
    """
    module, _, name = path.rpartition(".")
    try:
        target: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import middleware {path!r}: {error}") from error
    if inspect.iscoroutinefunction(target):
        return Middleware(BaseHTTPMiddleware, dispatch=target)
    if callable(target):
        return Middleware(target)
    raise ValueError(f"middleware {path!r} is neither a class nor an async function")


class RequestId:
    """ASGI middleware that gives every request an id, adds warnings to its response, and sets a proxy's root path.

    The id is the client's X-Request-Id if that is a valid header value, else a random one. It is returned in a
    header and logged, but never used as a key, since clients may send the same id twice.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app, self._root_path = app, root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its id, and add the id to the response."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if VALID_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        name = request_id.decode("latin-1")
        warnings = begin_warnings(name)

        changes = {
            "request_id": name,
            "client_request_id": name if request_id == given else "",
            "root_path": self._root_path,
        }
        scope = {**scope, **changes}
        ids = [(header, request_id) for header in api_shape(scope).id_headers]

        async def send_with_id(message: Message) -> None:
            if message["type"] in STARTS:
                message["headers"] = [*message.get("headers", ()), *ids, *warnings.headers()]
            await send(message)

        await self.app(scope, receive, send_with_id)
