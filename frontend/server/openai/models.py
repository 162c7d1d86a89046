"""The endpoint /v1/models: the names of the served models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.protocol import ModelCard, ModelList
from pagewire.frontend.server.service import Service


def routes(service: Service) -> list[Operation]:
    """Return the routes of the endpoint."""

    async def list_models(request: Request) -> Response:
        return json_response(ModelList([card(own, name) for own in service.all for name in own.names]))

    async def show_model(request: Request) -> Response:
        name = request.path_params["model"]
        own = service.of(name)
        own.model(name)
        return json_response(card(own, name))

    return [
        Operation("GET", "/v1/models", list_models, "List the names of the served models.", result=ModelList),
        Operation(
            "GET",
            "/v1/models/{model:path}",
            show_model,
            "Get one of the names of the served models.",
            result=ModelCard,
        ),
    ]


def card(service: Service, name: str) -> ModelCard:
    """Return the description of the model under one of its names."""
    info = service.info
    return ModelCard(id=name, created=service.created, root=info.model, max_model_len=info.max_model_len)
