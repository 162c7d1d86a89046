"""Endpoints to load and unload models that are loaded on demand, with `--enable-admin`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.operate.admin import guard_endpoint
from pagewire.frontend.server.serving.exchange import while_connected
from pagewire.frontend.server.serving.service import ModelEntry, Services
from pagewire.frontend.server.shelf.services import ShelvedServices


class ModelName(msgspec.Struct):
    """POST /models/load and /models/unload. model: its name, as /v1/models lists it."""

    model: str


NAMED = Decoder(ModelName)


def routes(services: Services) -> list[Operation]:
    """The endpoints; none unless models are loaded on demand, and `--enable-admin` is given."""
    if not isinstance(services, ShelvedServices) or not services.options.enable_admin:
        return []

    async def load(request: Request) -> Response:
        name = services.named((await read_request(request, NAMED, services.options)).model)
        await while_connected(load_on_shelf(services, name), request.receive)
        return json_response(services.entry(name))

    async def unload(request: Request) -> Response:
        name = services.unload((await read_request(request, NAMED, services.options)).model)
        return json_response(services.entry(name))

    return [
        Operation(
            "POST",
            "/models/load",
            guard_endpoint(load),
            "Load a model, and wait until it is ready.",
            body=ModelName,
            result=ModelEntry,
        ),
        Operation(
            "POST",
            "/models/unload",
            guard_endpoint(unload),
            "End a model as soon as no request uses it.",
            body=ModelName,
            result=ModelEntry,
        ),
    ]


async def load_on_shelf(services: ShelvedServices, name: str) -> None:
    """Load a model. Raises APIError."""
    async with services.use(name):
        pass
