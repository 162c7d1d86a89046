"""Endpoints for monitoring: health, version, load and metrics."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.client import AsyncLLM
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.tenants import ApiTenant, tenant_of
from pagewire.frontend.server.http.traffic import Traffic
from pagewire.frontend.server.operate.metrics import CONTENT_TYPE, exposition
from pagewire.frontend.server.serving.service import Services
from pagewire.ipc.environment import env_float
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.version import __version__
from pagewire.ipc.wire.calls import HealthReport

ANSWER_SECONDS = 5.0  # a scrape that takes longer has failed
HEALTH_SECONDS = 1.0  # for which the core's answer about its health is given again
KEPT_SECONDS = 5.0  # likewise while the core is asked anew, and has not answered for `PATIENCE_SECONDS`
PATIENCE_SECONDS = 0.25


def routes(services: Services) -> list[Operation]:
    """The endpoints of a server."""
    monitors: dict[AsyncLLM, HealthMonitor] = {}

    async def reports() -> list[HealthReport]:
        nonlocal monitors
        engines = [served.engine for served in services.all]
        monitors = {engine: monitors.get(engine) or HealthMonitor(engine) for engine in engines}
        return [await monitor.report() for monitor in monitors.values()]

    async def health(request: Request) -> Response:
        return answer_health("alive", await reports())

    async def ready(request: Request) -> Response:
        return answer_health("ready", await reports())

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def load(request: Request) -> Response:
        return json_response({"server_load": len(services.open)})

    async def metrics(request: Request) -> Response:
        answers = [await answer_of(served.engine, "metrics") for served in services.all]
        traffic: Traffic = request.app.state.traffic
        rows = visible_rows([row for rows in answers for row in rows], tenant_of(request.scope))
        rows += traffic.rows()
        return Response(exposition(rows), headers={"content-type": CONTENT_TYPE})

    return [
        Operation(
            "GET",
            "/health",
            health,
            "200 if the engine (each, if several) is proven to live; else 503, and why.",
        ),
        Operation("GET", "/ready", ready, "200 if the engine takes requests; else 503, and why."),
        Operation("GET", "/ping", health, "As /health."),
        Operation("POST", "/ping", health, "As /health."),
        Operation("GET", "/version", version, "The version.", result=dict[str, str]),
        Operation("GET", "/load", load, "Generations in flight on this server.", result=dict[str, int]),
        Operation(
            "GET",
            "/metrics",
            metrics,
            "What the engine and this server measure, for Prometheus.",
            media="text/plain",
        ),
    ]


class HealthMonitor:
    """Asks the core for its health, at most once a second while it is well, however many clients ask.

    The answer stands behind what else the core sends to this server. Where that is much, a good answer is given
    again, so that a probe is not late because others ask for a lot. A bad one is given once.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._asked: asyncio.Task[HealthReport] | None = None
        self._answer = HealthReport(alive=False, ready=False, reason="")  # the last one
        self._answered_at = -math.inf

    async def report(self) -> HealthReport:
        """The report that `AsyncLLM.health` returns.

        Raises:
            EngineDeadError: the core is lost, or does not answer.
        """
        if (dead := self._engine.dead_error) is not None:
            raise EngineDeadError(*dead.args)
        age = time.monotonic() - self._answered_at if self._answer["ready"] else math.inf
        if age < HEALTH_SECONDS:
            return self._answer
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._ask())
            self._asked.add_done_callback(read_task_error)
        if age < KEPT_SECONDS:
            await asyncio.wait([self._asked], timeout=PATIENCE_SECONDS)
            if not self._asked.done():
                return self._answer
        return await asyncio.shield(self._asked)

    async def _ask(self) -> HealthReport:
        self._answer = await self._engine.health()
        self._answered_at = time.monotonic()
        return self._answer


def read_task_error(asked: asyncio.Task[HealthReport]) -> None:
    """Read the error of a task, if it has one: asyncio logs errors of tasks that nobody reads."""
    if not asked.cancelled():
        asked.exception()


def answer_health(state: Literal["alive", "ready"], reports: Sequence[HealthReport]) -> Response:
    """200 if all engines are in this state; or an error with the reason of the first that is not.

    Raises:
        APIError: one is not.
    """
    for report in reports:
        if not report[state]:
            raise APIError(503, report["reason"], code="engine_unhealthy")
    return Response()


def visible_rows(rows: list[dict[str, Any]], tenant: ApiTenant) -> list[dict[str, Any]]:
    """The metrics that a tenant may see: of those by tenant its own, unless it has the right `admin`."""
    if tenant.admin:
        return rows
    return [row for row in rows if row["labels"].get("tenant", tenant.name) == tenant.name]


async def answer_of(engine: AsyncLLM, method: str) -> Any:
    """The core's answer to a call, for which it needs no other process.

    Raises:
        EngineDeadError: it is lost. APIError: it is not, but does not answer.
    """
    seconds = env_float("PAGEWIRE_RPC_GET_DATA_TIMEOUT_MS", 1e3 * ANSWER_SECONDS) / 1e3
    try:
        return await asyncio.wait_for(asyncio.wrap_future(engine.session.call(method)), seconds)
    except asyncio.TimeoutError:
        raise APIError(503, f"the engine has not answered for {seconds:g} s") from None
