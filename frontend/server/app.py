"""The server as an ASGI application: endpoints, and what stands before them.

CORS --> keys --> the user's middleware --> routes
"""

from __future__ import annotations

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from pagewire.frontend.async_llm import AsyncLLM
from pagewire.frontend.server.http import openapi
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import on_error, on_http_error
from pagewire.frontend.server.http.middleware import middleware
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai import chat, completions, models, tokenization
from pagewire.frontend.server.operate import admin, monitoring
from pagewire.frontend.server.options import ServerOptions
from pagewire.frontend.server.page import page_routes
from pagewire.frontend.server.responses import routes as responses
from pagewire.frontend.server.service import Service
from pagewire.ipc.errors import EngineBusyError, EngineDeadError

# Exceptions with an answer; Exception itself is answered, too, and logged with its traceback.
ANSWERED = (
    APIError,
    EngineDeadError,
    EngineBusyError,
    ValueError,
    TypeError,
    msgspec.MsgspecError,
    Exception,
)
FAMILIES = (completions, chat, responses, models, tokenization, monitoring, admin)


def create_app(engine: AsyncLLM, options: ServerOptions | None = None) -> Starlette:
    """The application. The engine is the caller's: it is not shut down with the application.

    Raises:
        ValueError: bad options, or a middleware that cannot be imported.
    """
    options = options or ServerOptions()
    options.check()
    service = Service(engine, options)
    routes: list[Operation] = [route for family in FAMILIES for route in family.routes(service)]
    routes.append(openapi.document_route(routes, service.options))
    app = Starlette(
        routes=[*routes, *page_routes()],
        middleware=middleware(options),
        exception_handlers={HTTPException: on_http_error, **dict.fromkeys(ANSWERED, on_error)},
    )
    app.router.redirect_slashes = False  # a path with a slash too many is another path
    app.state.service = service
    return app
