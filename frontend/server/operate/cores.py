"""Endpoints for the cores behind a router (`pagewire route`), with `--enable-admin`: list, add, drain."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.route.fleet import Fleet
from pagewire.frontend.route.replica import Replica
from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.operate.admin import guard_endpoint
from pagewire.frontend.server.serving.service import Service, Services, services_of
from pagewire.ipc.errors import EngineDeadError, ProtocolError


class AddCore(msgspec.Struct):
    """POST /cores. address: of a running core: ipc://..., or tcp://... (beyond loopback with CURVE keys)."""

    address: str


class DrainCore(msgspec.Struct):
    """POST /cores/drain. core: its number. move: its requests go on elsewhere at once, rather than end there."""

    core: int
    move: bool = False


class Core(msgspec.Struct):
    """A core behind the router.

    state: joining, up, lost, draining or gone. problem: why it was lost, or not reached. requests: that it has.
    waiting_tokens: of prompts, to be computed. running: sequences beyond their prompt. blocks: cached, as reported.
    """

    core: int
    place: str
    state: str
    problem: str | None
    requests: int
    waiting_tokens: int
    running: int
    blocks: int


TO_ADD, TO_DRAIN = Decoder(AddCore), Decoder(DrainCore)


def routes(services: Services) -> list[Operation]:
    """The endpoints; none unless the server is a router, and has `--enable-admin`."""
    routed = isinstance(services, Service) and isinstance(services.engine.session.connection, Fleet)
    if not (services.options.enable_admin and routed):
        return []
    return [
        Operation("GET", "/cores", guard_endpoint(cores), "The cores behind this router.", result=list[Core]),
        Operation(
            "POST", "/cores", guard_endpoint(add_core), "Use one more core.", body=AddCore, result=Core
        ),
        Operation(
            "POST",
            "/cores/drain",
            guard_endpoint(drain),
            "Send a core no more requests, and leave it once it has none.",
            body=DrainCore,
            result=Core,
        ),
    ]


async def cores(request: Request) -> Response:
    """GET /cores."""
    fleet = fleet_of(request)
    return json_response([describe_core(fleet, replica) for replica in fleet.members])


async def add_core(request: Request) -> Response:
    """POST /cores."""
    fleet = fleet_of(request)
    address = (await read_request(request, TO_ADD, services_of(request).options)).address
    try:
        replica = await asyncio.to_thread(fleet.add, address)
    except (EngineDeadError, ProtocolError, OSError) as error:
        raise APIError(400, f"{address}: {error}", param="address", code="core_not_reached") from error
    return json_response(describe_core(fleet, replica))


async def drain(request: Request) -> Response:
    """POST /cores/drain."""
    fleet = fleet_of(request)
    body = await read_request(request, TO_DRAIN, services_of(request).options)
    return json_response(describe_core(fleet, await asyncio.to_thread(fleet.drain, body.core, body.move)))


def fleet_of(request: Request) -> Fleet:
    """The cores behind the server that handles a request."""
    fleet: Any = services_of(request).of(None).engine.session.connection
    assert isinstance(fleet, Fleet)
    return fleet


def describe_core(fleet: Fleet, replica: Replica) -> Core:
    """A core as the endpoints answer it."""
    return Core(
        replica.number,
        replica.place.label,
        replica.state.value,
        None if replica.problem is None else str(replica.problem),
        fleet.dispatcher.num_requests(replica),
        replica.num_waiting,
        replica.num_running,
        fleet.dispatcher.num_blocks(replica),
    )
