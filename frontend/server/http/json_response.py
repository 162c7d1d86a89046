"""JSON responses and error responses of endpoints that do not generate."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from pagewire.frontend.server.http.api_shapes import api_shape
from pagewire.frontend.server.http.errors import APIError, api_error
from pagewire.ipc.quoting import quoted


def json_response(value: Any, status: int = 200) -> Response:
    """Return a response with a struct as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(error: Exception, scope: Scope) -> Response:
    """Return the response for an exception, in the shape of the API of the request."""
    reported, shape = api_error(error), api_shape(scope)
    body, status = shape.encode(reported), shape.status(reported)
    return Response(body, status, reported.headers, media_type="application/json")


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for any exception."""
    return error_response(error, request.scope)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for errors of the router: unknown path, or wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    option = getattr(request.app.state, "hidden_paths", {}).get(path)
    message = {
        404: f"unknown path {quoted(path)}" if option is None else f"{path} needs a server with {option}",
        405: f"{quoted(path)} does not support {request.method}",
    }.get(error.status_code, error.detail)
    refusal = APIError(error.status_code, message, headers=dict(error.headers or {}))
    return error_response(refusal, request.scope)
