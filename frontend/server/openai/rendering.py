"""The endpoints /v1/chat/completions/render and /v1/completions/render: the prompts of requests, for gateways.

A gateway that chooses a server by its cached prefixes needs the tokens that a request would have. They may then be
sent as the `prompt` of /v1/completions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from pagewire.frontend.client import has_media, media_threads, num_chars, request_ids, tokenize_off_loop
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.completions import completion_params, prompts_in, without_special_tokens
from pagewire.frontend.server.openai.custom_tools import in_functions
from pagewire.frontend.server.openai.prepared_chat import prepare_chat
from pagewire.frontend.server.openai.protocol import ChatRequest, CompletionRequest, SamplingFields
from pagewire.frontend.server.openai.sampling import salt_prompt
from pagewire.frontend.server.openai.size import check_amount
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.generation_endpoint import GenerationEndpoint
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.ipc.wire.params import SamplingParams


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """The prompt of a request. prompt: its text, if it is known. token_ids: with places of pictures and sounds."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt: str | None = None


def routes(services: Services) -> list[Operation]:
    """Return the routes of the endpoints."""
    return [
        Operation(
            "POST",
            "/v1/chat/completions/render",
            GenerationEndpoint(services, "chatcmpl-", ChatRequest, render_chat_request),
            "Get the prompt of a conversation, without generating.",
            body=ChatRequest,
            result=RenderedPrompt,
        ),
        Operation(
            "POST",
            "/v1/completions/render",
            GenerationEndpoint(services, "cmpl-", CompletionRequest, render_completion_request),
            "Get the tokens of prompts, without generating.",
            body=CompletionRequest,
            result=list[RenderedPrompt],
        ),
    ]


async def render_chat_request(service: Service, request: ChatRequest, exchange: Exchange) -> bytes:
    """The prompt of a conversation, as JSON. Raises as a chat completion."""
    request, _ = in_functions(request)
    chat = await prepare_chat(service, request, exchange)
    return sse.ENCODER.encode(await render_prompt(service, request, chat.prompt, chat.params, exchange.id))


async def render_completion_request(
    service: Service, request: CompletionRequest, exchange: Exchange
) -> bytes:
    """The prompts of a request for completions, as JSON. Raises as a completion."""
    if request.prompt_embeds:
        raise APIError(
            400, "prompt_embeds are no tokens: only prompts of text are rendered", param="prompt_embeds"
        )
    service.model(request.model)
    prompts, params = prompts_in(service, request), completion_params(service, request)
    check_amount(service, len(prompts), params)
    if request.add_special_tokens is False:
        tokenizer = service.tokenizer_of(request.model)
        prompts = await without_special_tokens(service, tokenizer, prompts, params, request.cache_salt)
    names = request_ids(exchange.id, len(prompts))
    rows = zip(prompts, names, strict=True)
    return sse.ENCODER.encode(
        [await render_prompt(service, request, prompt, params, name) for prompt, name in rows]
    )


async def render_prompt(
    service: Service, request: SamplingFields, prompt: Any, params: SamplingParams, name: str
) -> RenderedPrompt:
    """A prompt as the engine would get it. name: id of the request.

    Raises:
        ValueError, TypeError: the engine would refuse it.
    """
    work = partial(
        service.engine.session.intake.prepare,
        salt_prompt(prompt, request.cache_salt),
        params,
        name,
        request.priority or 0,
        lora_request=service.adapter(request.model),
        prompt_adapter_request=service.prompt_adapter(request.model),
    )
    prepared = await (
        media_threads.run(work) if has_media(prompt) else tokenize_off_loop(num_chars(prompt), work)
    )
    token_ids = prepared.request.prompt.token_ids[prepared.num_virtual_tokens :]
    return RenderedPrompt(
        request_id=name,
        model=service.model(request.model),
        token_ids=token_ids,
        prompt=prepared.prompt_text,
    )
