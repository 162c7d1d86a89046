"""The server as an ASGI application: middleware and routes.

request id --> count --> Host and Origin --> CORS --> API key --> the user's middleware --> routes
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server import models
from pagewire.frontend.server.anthropic import routes as anthropic
from pagewire.frontend.server.audio import routes as audio
from pagewire.frontend.server.demonstration import routes as demonstration
from pagewire.frontend.server.http import openapi
from pagewire.frontend.server.http.body import LARGE_BODIES, IncomingBodies
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import on_error, on_http_error
from pagewire.frontend.server.http.middleware import middleware
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.traffic import Traffic
from pagewire.frontend.server.ollama import routes as ollama
from pagewire.frontend.server.openai import chat, completions, tokenization
from pagewire.frontend.server.operate import admin, cores, monitoring, served
from pagewire.frontend.server.page import page_routes
from pagewire.frontend.server.pooling import routes as pooling
from pagewire.frontend.server.responses import routes as responses
from pagewire.frontend.server.serving.answer_memory import AnswerMemory
from pagewire.frontend.server.serving.service import Service
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
MODULES = (
    completions,
    chat,
    responses,
    anthropic,
    ollama,
    demonstration,
    pooling,
    audio,
    models,
    tokenization,
    monitoring,
    served,
    admin,
    cores,
)


def create_app(
    engine: AsyncLLM, options: ServerOptions | None = None, others: Sequence[AsyncLLM] = ()
) -> Starlette:
    """Return the application. The engines belong to the caller and are not shut down with the application.

    others: engines of further models; a request's `model` says which one it is for.

    Raises:
        ValueError, TypeError: an option is bad, a middleware cannot be imported, or two models have one name.
    """
    options = options or ServerOptions()
    options.check()
    service = Service(engine, options, others)
    priorities = any(served.info.by_priority for served in service.all)
    routes: list[Operation] = [route for module in MODULES for route in module.routes(service)]
    routes.append(openapi.document_route(routes, service.options))
    app = Starlette(
        routes=[*routes, *page_routes()],
        middleware=middleware(options, priorities=priorities),
        exception_handlers={HTTPException: on_http_error, **dict.fromkeys(HANDLED, on_error)},
    )
    app.router.redirect_slashes = False  # a path with an additional slash is an unknown path
    app.state.service = service
    served_paths = {route.path for route in routes}
    hidden = [route.path for route in admin.operations() if route.path not in served_paths]
    app.state.hidden_paths = dict.fromkeys(hidden, "--enable-admin")
    app.state.traffic = Traffic()
    app.state.answer_memory = AnswerMemory(MAX_OPEN_POOLED_BYTES)
    app.state.incoming_bodies = IncomingBodies(LARGE_BODIES * options.max_request_bytes)
    return app
