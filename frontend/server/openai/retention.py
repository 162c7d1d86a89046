"""The endpoints /v1/retention/prefetch and /v1/retention/release: prefixes that are kept in the cache."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.tenants import tenant_of
from pagewire.frontend.server.openai.prepared_chat import prepare_chat
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.generation_endpoint import GenerationEndpoint
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.frontend.server.serving.usage import PromptTokensDetails
from pagewire.ipc.wire.items import Retention
from pagewire.ipc.wire.params import Name


class ReleaseRequest(msgspec.Struct):
    """POST /v1/retention/release: one of both names that requests of the same key have given."""

    session_id: Name | None = None
    prompt_cache_key: Name | None = None
    model: Name | None = None


class ReleaseResponse(msgspec.Struct):
    """released_tokens: those that are not kept any more. They stay cached until others need the room."""

    released_tokens: int


class PrefetchResponse(msgspec.Struct):
    """The prompt's tokens: all; those that were cached before (`cached_tokens`), and that are kept now
    (`retained_tokens`).
    """

    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails


TO_RELEASE = Decoder(ReleaseRequest)


def routes(services: Services) -> list[Operation]:
    """Return the routes of the endpoints."""

    async def release(request: Request) -> Response:
        fields = await read_request(request, TO_RELEASE, services.options)
        names = [name for name in (fields.session_id, fields.prompt_cache_key) if name]
        if len(names) != 1:
            raise APIError(400, "give either session_id or prompt_cache_key", param="session_id")
        async with services.use(fields.model) as own:
            released = await own.engine.release_prefixes(names[0], tenant_of(request.scope).name)
            return json_response(ReleaseResponse(released))

    return [
        Operation(
            "POST",
            "/v1/retention/prefetch",
            GenerationEndpoint(services, "prefetch-", ChatRequest, prefetch),
            "Compute the prompt of a conversation, and keep it cached for a request that comes soon.",
            body=ChatRequest,
            result=PrefetchResponse,
        ),
        Operation(
            "POST",
            "/v1/retention/release",
            release,
            "Keep prefixes in the cache no longer.",
            body=ReleaseRequest,
            result=ReleaseResponse,
        ),
    ]


async def prefetch(service: Service, request: ChatRequest, exchange: Exchange) -> bytes:
    """Run a conversation up to the first token of its answer, which is dropped, and keep its prompt.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    for name in ("stream", "use_beam_search", "n"):
        if getattr(request, name):
            raise APIError(
                400, f"{name} has no meaning here: a prompt is computed, and no answer", param=name
            )
    chat = await prepare_chat(
        service, msgspec.structs.replace(request, max_completion_tokens=1, min_tokens=None), exchange
    )
    wishes = chat.retention or [Retention(name=request.prompt_cache_key or "")]
    chat = replace(chat, retention=[msgspec.structs.replace(wish, with_output=False) for wish in wishes])
    async with aclosing(chat.outputs()) as batches:
        async for ((_, output),) in batches:
            exchange.count(0, output)
    usage = exchange.usage()
    assert usage.prompt_tokens_details is not None
    return msgspec.json.encode(PrefetchResponse(usage.prompt_tokens, usage.prompt_tokens_details))
