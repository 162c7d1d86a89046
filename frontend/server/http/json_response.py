"""JSON answers of endpoints that are no generations, and their errors."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.server.http.errors import APIError, api_error


def json_response(value: Any, status: int = 200) -> Response:
    """A struct as an answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(error: Exception) -> Response:
    """An error as an answer."""
    told = api_error(error)
    return Response(told.encode(), told.status, told.headers, media_type="application/json")


async def on_error(request: Request, error: Exception) -> Response:
    """Answers any exception."""
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answers what the router raises: no such path, or another method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = {
        404: f"there is nothing at {path!r}",
        405: f"{request.method} is not a method of {path!r}",
    }.get(error.status_code, error.detail)
    return error_response(APIError(error.status_code, message, headers=dict(error.headers or {})))
