"""Endpoints for monitoring: health, version, load and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.async_llm import AsyncLLM
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.tenants import Tenant, tenant_of
from pagewire.frontend.server.operate.metrics import CONTENT_TYPE, exposition
from pagewire.frontend.server.service import Service
from pagewire.ipc.version import __version__

ANSWER_SECONDS = 5.0  # a scrape that takes longer has failed


def routes(service: Service) -> list[Operation]:
    """The endpoints of a server."""
    engine = service.engine

    async def health(request: Request) -> Response:
        await engine.check_health()
        return Response()

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def load(request: Request) -> Response:
        return json_response({"server_load": len(service.open)})

    async def metrics(request: Request) -> Response:
        rows = visible_rows(await answer_of(engine, "metrics"), tenant_of(request.scope))
        return Response(exposition(rows), headers={"content-type": CONTENT_TYPE})

    return [
        Operation("GET", "/health", health, "200 while the engine lives, 503 when it is down."),
        Operation("GET", "/ping", health, "As /health."),
        Operation("POST", "/ping", health, "As /health."),
        Operation("GET", "/version", version, "The version.", result=dict[str, str]),
        Operation("GET", "/load", load, "Generations in flight on this server.", result=dict[str, int]),
        Operation(
            "GET", "/metrics", metrics, "What the engine measures, for Prometheus.", media="text/plain"
        ),
    ]


def visible_rows(rows: list[dict[str, Any]], tenant: Tenant) -> list[dict[str, Any]]:
    """The metrics that a tenant may see: of those by tenant its own, unless it has the right `admin`."""
    if tenant.admin:
        return rows
    return [row for row in rows if row["labels"].get("tenant", tenant.name) == tenant.name]


async def answer_of(engine: AsyncLLM, method: str) -> Any:
    """The core's answer to a call, for which it needs no other process.

    Raises:
        EngineDeadError: it is lost. APIError: it is not, but does not answer.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(engine.session.call(method)), ANSWER_SECONDS)
    except asyncio.TimeoutError:
        raise APIError(503, f"the engine has not answered for {ANSWER_SECONDS:g} s") from None
