"""The endpoint /v1/models: the names of the served models, and their adapters.

OpenAI's API and Anthropic's have the same paths, and differ in the header `anthropic-version`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.server.anthropic.models import (
    DEFAULT_LIMIT,
    Limit,
    MessageModel,
    MessageModelPage,
    message_model,
    models_page,
)
from pagewire.frontend.server.anthropic.routes import check_version
from pagewire.frontend.server.http.api_shapes import ANTHROPIC, api_shape
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.query import Query, read_number
from pagewire.frontend.server.openai.models import card, cards_of
from pagewire.frontend.server.openai.protocol import ModelCard, ModelList
from pagewire.frontend.server.serving.service import Services

LIMIT = Query("limit", Limit, f"Anthropic's: most models of a page; {DEFAULT_LIMIT} by default")
PAGE = (
    LIMIT,
    Query("after_id", str, "Anthropic's: the page after this model"),
    Query("before_id", str, "Anthropic's: the page before this model"),
)


def routes(services: Services) -> list[Operation]:
    """Return the routes of the endpoint."""

    async def list_models(request: Request) -> Response:
        cards = cards_of(services)
        if api_shape(request.scope) is not ANTHROPIC:
            return json_response(ModelList(cards))
        check_version(request.headers)
        return json_response(
            models_page(cards, request.query_params, read_number(request, LIMIT, DEFAULT_LIMIT))
        )

    async def show_model(request: Request) -> Response:
        name = request.path_params["model"]
        found = found_card(services, name)
        if api_shape(request.scope) is not ANTHROPIC:
            return json_response(found)
        check_version(request.headers)
        return json_response(message_model(found))

    return [
        Operation(
            "GET",
            "/v1/models",
            list_models,
            "List the names of the served models, and their adapters.",
            result=ModelList,
            others=(MessageModelPage,),
            query=PAGE,
        ),
        Operation(
            "GET",
            "/v1/models/{model:path}",
            show_model,
            "Get one of the names of the served models, or an adapter.",
            result=ModelCard,
            others=(MessageModel,),
        ),
    ]


def found_card(services: Services, name: str) -> ModelCard:
    """Return the description of a name; of a model that is loaded on demand, also if it is not loaded.

    Raises:
        APIError: there is no model with that name.
    """
    cards = {found.id: found for found in cards_of(services)} if services.entries else {}
    return cards.get(name) or card(services.of(name), name)
