"""The endpoints /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import contextlib

import msgspec
from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.client import (
    check_vocabulary,
    encode_within,
    off_loop,
    template_source,
    tokenize_off_loop,
)
from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.query import Query
from pagewire.frontend.server.openai.prepared_chat import place_media, prompt_of
from pagewire.frontend.server.openai.protocol import (
    ChatRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.serving.exchange import while_connected
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.ipc.wire.budget import MIN_DETOKENIZED

MODEL = Query("model", str, "a name of the model or the adapter that is meant; by default the first model")
TO_TOKENS = Decoder(TokenizeRequest)
TO_TEXT = Decoder(DetokenizeRequest)


def routes(services: Services) -> list[Operation]:
    """Return the routes of the endpoints."""

    async def tokenize(request: Request) -> Response:
        fields = await read_request(request, TO_TOKENS, services.options)
        async with services.use(fields.model) as own:
            tokenizer = own.tokenizer_of(fields.model)
            tokens = await while_connected(tokenize_request(own, fields), request.receive)
            names = tokenizer.convert_ids_to_tokens(tokens) if fields.return_token_strs else msgspec.UNSET
            return json_response(TokenizeResponse(tokens, len(tokens), own.info.max_model_len, names))

    async def detokenize(request: Request) -> Response:
        fields = await read_request(request, TO_TEXT, services.options)
        async with services.use(fields.model) as own:
            return json_response(DetokenizeResponse(await request_text(own, fields)))

    async def show(request: Request) -> Response:
        name = request.query_params.get("model")
        async with services.use(name) as own:
            return json_response(describe_tokenizer(own, name))

    return [
        Operation(
            "GET",
            "/tokenizer_info",
            show,
            "Describe the tokenizer, for clients that tokenize at this server.",
            result=TokenizerInfo,
            query=[MODEL],
        ),
        Operation(
            "POST",
            "/tokenize",
            tokenize,
            "Convert a text or a conversation to token ids.",
            body=TokenizeRequest,
            result=TokenizeResponse,
        ),
        Operation(
            "POST",
            "/detokenize",
            detokenize,
            "Convert token ids to text.",
            body=DetokenizeRequest,
            result=DetokenizeResponse,
        ),
    ]


async def tokenize_request(service: Service, fields: TokenizeRequest) -> list[int]:
    """Return the token ids of the prompt that a completion or chat completion would get.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
    """
    if (fields.prompt is None) == (fields.messages is None):
        raise APIError(400, "give either prompt or messages", param="prompt")
    if fields.messages is not None:
        chat_fields = {
            name: getattr(fields, name) for name in TO_TOKENS.fields if name in ChatRequest.__struct_fields__
        }
        tools = ToolUse(prompted=fields.tools)
        prompt = await prompt_of(service, ChatRequest(**chat_fields), tools, counts=True)
        return await place_media(service, prompt)
    text, special = fields.prompt or "", fields.add_special_tokens is not False
    max_model_len = service.info.max_model_len
    tokenizer = service.tokenizer_of(fields.model)
    return await tokenize_off_loop(len(text), encode_within, tokenizer, text, max_model_len, special, True)


async def request_text(service: Service, fields: DetokenizeRequest) -> str:
    """Return the text of token ids.

    Raises:
        APIError, ValueError: the request is invalid.
    """
    tokenizer, info = service.tokenizer_of(fields.model), service.info
    limit = max(MIN_DETOKENIZED, info.max_model_len)
    if len(fields.tokens) > limit:
        raise APIError(
            400, f"tokens must have at most {limit} entries, got {len(fields.tokens)}", param="tokens"
        )
    check_vocabulary("tokens", fields.tokens, info.vocab_size)
    return await off_loop(
        len(fields.tokens), lambda: tokenizer.decode(fields.tokens, skip_special_tokens=False)
    )


def describe_tokenizer(service: Service, name: str | None) -> TokenizerInfo:
    """Return the description of the tokenizer of a model, or of an adapter.

    Raises:
        APIError: there is none, or no model with that name.
    """
    tokenizer = service.tokenizer_of(name)
    named = TokenizerInfo.__struct_fields__
    special = {name: token for name, token in tokenizer.special_tokens.items() if name in named}
    template: str | UnsetType = msgspec.UNSET
    with contextlib.suppress(ValueError):  # there is none
        template = template_source(tokenizer, service.options.chat_template, with_tools=False)
    kind = type(tokenizer.original).__name__
    return TokenizerInfo(kind, service.info.max_model_len, template, **special)
