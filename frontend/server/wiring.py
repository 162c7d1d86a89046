"""The APIs that a server has: the one place that knows them all."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

from pagewire.frontend.client import AsyncLLM
from pagewire.frontend.server import models
from pagewire.frontend.server.anthropic import routes as anthropic
from pagewire.frontend.server.app import open_app
from pagewire.frontend.server.audio import routes as audio
from pagewire.frontend.server.batches import routes as batches
from pagewire.frontend.server.decisions import routes as decisions
from pagewire.frontend.server.demonstration import routes as demonstration
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.ollama import routes as ollama
from pagewire.frontend.server.openai import chat, completions, rendering, retention, tokenization
from pagewire.frontend.server.operate import admin, cores, monitoring, served
from pagewire.frontend.server.page import page_routes
from pagewire.frontend.server.pooling import routes as pooling
from pagewire.frontend.server.responses import routes as responses
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.frontend.server.serving.socket import SocketRequests
from pagewire.frontend.server.shelf import routes as shelf

MODULES = (
    completions,
    chat,
    responses,
    decisions,
    batches,
    anthropic,
    ollama,
    demonstration,
    pooling,
    audio,
    models,
    tokenization,
    rendering,
    retention,
    monitoring,
    served,
    admin,
    cores,
    shelf,
)
"""Each has `routes(services)`, which returns its operations."""


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
    return application(Service(engine, options, others))


def application(services: Services) -> Starlette:
    """Return the application that serves models.

    Raises:
        ValueError, TypeError: a middleware cannot be imported, or the chat template cannot be used.
    """
    operations = [operation for module in MODULES for operation in module.routes(services)]
    hidden = {operation.path: "--enable-admin" for operation in admin.operations()}
    hidden |= dict.fromkeys(batches.PATHS, "--batch-dir")
    sockets = [WebSocketRoute(responses.PATH, SocketRequests())]
    return open_app(services, operations, sockets, page_routes(), hidden)
