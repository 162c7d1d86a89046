"""Whether the server lives, what it is, and how much it has to do."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pagewire import __version__
from pagewire.frontend.server.openapi import Operation
from pagewire.frontend.server.responding import json_response
from pagewire.frontend.server.service import Service


def routes(service: Service) -> list[Operation]:
    """The endpoints."""

    async def health(request: Request) -> Response:
        await service.engine.check_health()
        return Response()

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def load(request: Request) -> Response:
        return json_response({"server_load": len(service.open)})

    return [
        Operation("GET", "/health", health, "200 while the engine lives, 503 when it is down."),
        Operation("GET", "/ping", health, "As /health."),
        Operation("POST", "/ping", health, "As /health."),
        Operation("GET", "/version", version, "The version.", result=dict[str, str]),
        Operation("GET", "/load", load, "Generations in flight on this server.", result=dict[str, int]),
    ]
