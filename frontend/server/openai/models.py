"""/v1/models: the names that the model is served by."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.protocol import ModelCard, ModelList
from pagewire.frontend.server.service import Service


def routes(service: Service) -> list[Operation]:
    """The endpoints."""

    async def list_models(request: Request) -> Response:
        return json_response(ModelList([card(service, name) for name in service.names]))

    async def show_model(request: Request) -> Response:
        name = request.path_params["model"]
        service.model(name)
        return json_response(card(service, name))

    return [
        Operation("GET", "/v1/models", list_models, "The names of the model.", result=ModelList),
        Operation("GET", "/v1/models/{model:path}", show_model, "One of the names.", result=ModelCard),
    ]


def card(service: Service, name: str) -> ModelCard:
    """What there is to say of the model by one of its names."""
    info = service.info
    return ModelCard(id=name, created=service.created, root=info.model, max_model_len=info.max_model_len)
