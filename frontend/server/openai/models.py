"""The endpoint /v1/models: the names of the served model."""

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
        return json_response(ModelList(cards(service)))

    async def show_model(request: Request) -> Response:
        name = request.path_params["model"]
        service.model(name)
        return json_response(next(found for found in cards(service) if found.id == name))

    return [
        Operation("GET", "/v1/models", list_models, "List the names of the served model.", result=ModelList),
        Operation(
            "GET",
            "/v1/models/{model:path}",
            show_model,
            "Get one of the names of the served model.",
            result=ModelCard,
        ),
    ]


def cards(service: Service) -> list[ModelCard]:
    """Return the descriptions of all names: the model's own, then those of prompt adapters."""
    return [*(card(service, name) for name in service.names), *prompt_adapter_cards(service)]


def prompt_adapter_cards(service: Service) -> list[ModelCard]:
    """Return the descriptions of the prompt adapters, whose parent is the model."""
    return [
        ModelCard(
            id=name,
            created=service.created,
            root=adapter.prompt_adapter_local_path,
            parent=service.names[0],
            max_model_len=service.info.max_model_len - adapter.prompt_adapter_num_virtual_tokens,
        )
        for name, adapter in service.prompt_adapters.items()
    ]


def card(service: Service, name: str) -> ModelCard:
    """Return the description of the model under one of its names."""
    info = service.info
    return ModelCard(id=name, created=service.created, root=info.model, max_model_len=info.max_model_len)
